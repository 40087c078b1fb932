# Runs R for guest/kernels/hosted.py, which describes the messages.
#
# Values of all but the last expression are printed, as R itself does; the last one is shown. Plots are drawn by a
# device of ours and shown when the code has ended.
local({
  # Not "/dev/fd": a pipe can be opened again, and R must not seek in it.
  orders <- file("/proc/self/fd/3", "rb", raw = TRUE)
  events <- file("/proc/self/fd/4", "wb", raw = TRUE)
  folder <- tempfile("plots")
  dir.create(folder)
  pages <- file.path(folder, "%05d.png")

  tell <- function(word, ...) suspendInterrupts({
    parts <- lapply(list(...), function(part) if (is.raw(part)) part else charToRaw(enc2utf8(as.character(part))))
    sizes <- vapply(parts, length, 0L)
    writeBin(c(charToRaw(paste0(paste(c(word, sizes), collapse = " "), "\n")), unlist(parts)), events)
    flush(events)
  })

  end <- quit # code gets another one
  receive <- function(size) {
    data <- raw()
    while (length(data) < size) {
      more <- readBin(orders, "raw", size - length(data))
      if (!length(more)) end("no")
      data <- c(data, more)
    }
    text <- rawToChar(data)
    Encoding(text) <- "UTF-8"
    text
  }

  take <- function() {
    line <- character()
    while ((byte <- receive(1L)) != "\n") line <- c(line, byte)
    words <- strsplit(paste(line, collapse = ""), " ", fixed = TRUE)[[1]]
    c(words[1], lapply(as.integer(words[-1]), receive))
  }

  # ------------------------------------------------------------ plots

  options(
    device = function(...) grDevices::png(pages, width = 1200, height = 900, res = 150, type = "cairo"),
    menu.graphics = FALSE, width = 120, digits.secs = NULL, warn = 1, keep.source = TRUE, browser = "false",
    repos = c(CRAN = "https://cloud.r-project.org")
  )

  show_plots <- function() {
    grDevices::graphics.off()
    for (page in sort(list.files(folder, full.names = TRUE))) {
      tell("show", "image/png", readBin(page, "raw", file.size(page)))
      unlink(page)
    }
  }

  # ------------------------------------------------------------ one run

  draws <- function(value) inherits(value, c("ggplot", "trellis", "grob", "gtable", "recordedplot", "patchwork"))

  exited <- function(status) structure(class = c("exited", "condition"), list(message = "", call = NULL, status = status))
  leave <- function(save = "default", status = 0, runLast = TRUE) stop(exited(as.integer(status)))
  for (name in c("quit", "q")) {
    base <- baseenv()
    unlockBinding(name, base)
    assign(name, leave, base)
    lockBinding(name, base)
  }

  evaluate <- function(code) {
    expressions <- parse(text = code, keep.source = TRUE, encoding = "UTF-8")
    for (index in seq_along(expressions)) {
      found <- withVisible(eval(expressions[[index]], globalenv()))
      if (!found$visible) next
      value <- found$value
      if (index < length(expressions) || draws(value)) print(value)
      else tell("show", "text/plain", paste(utils::capture.output(print(value)), collapse = "\n"))
    }
  }

  calls <- NULL
  note_calls <- function(error) {
    # The calls between the code and the handler: those before and after are ours.
    all <- sys.calls()
    own <- which(vapply(all, function(call) identical(call[[1]], quote(withVisible)), NA))
    if (!length(own)) return() # the code cannot be parsed
    all <- all[-seq_len(own[1] + 2L)]
    calls <<- utils::head(vapply(all, function(call) deparse(call, nlines = 1L)[1], ""), -2L)
  }

  run <- function(code) {
    calls <<- NULL
    tryCatch(allowInterrupts(Sys.sleep(0)), interrupt = function(...) NULL) # it came too late for the last run
    tryCatch(
      {
        withCallingHandlers(allowInterrupts(evaluate(code)), error = note_calls)
        show_plots()
        tell("done")
      },
      exited = function(exit) tell("exited", exit$status),
      interrupt = function(...) {
        show_plots()
        tell("error", "Interrupted", "the code was stopped", "Interrupted: the code was stopped")
      },
      error = function(error) {
        show_plots()
        message <- conditionMessage(error)
        call <- conditionCall(error)
        own <- is.null(call) || any(vapply(c("parse", "eval"), function(name) identical(call[[1]], as.name(name)), NA))
        at <- if (own) "" else paste0(" in ", deparse(call, nlines = 1L)[1])
        name <- setdiff(class(error), "simpleError")[1]
        trace <- if (length(calls) > 1L) paste0("\nCalls: ", paste(calls, collapse = " -> ")) else ""
        tell("error", if (name == "error") "Error" else name, message, paste0("Error", at, ": ", message, trace))
      }
    )
    flush(stdout())
  }

  tell("ready")
  suspendInterrupts(repeat { # only code is interrupted
    order <- take()
    switch(order[[1]],
      run = run(order[[3]]),
      seed = set.seed(strtoi(substr(order[[2]], 1L, 7L), 16L)),
      set = do.call(Sys.setenv, stats::setNames(list(order[[3]]), order[[2]])),
      unset = Sys.unsetenv(order[[2]])
    )
  })
})
