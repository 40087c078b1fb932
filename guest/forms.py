"""The MIME types of the forms that a displayed value can have. Both sides of the wire know these and no others.

A kernel, of whatever language, sends a display as JSON: short forms by these types. `text/plain` is what a model reads.
The header names the files in the outputs directory that have the rest: a picture, a page, what is too long to send.
"""

PLAIN, HTML, PDF, SVG = "text/plain", "text/html", "application/pdf", "image/svg+xml"
PLOTLY = "application/vnd.plotly.v1+json"
VEGA_LITE = tuple(f"application/vnd.vegalite.v{version}+json" for version in (4, 5, 6))
CHART = "application/vnd.mcp-sandbox.chart+json"  # what a chart shows, see `guest.kernels.charts`

# With the extensions of their files. Pictures are files, and the best one comes first; text travels if it is short.
PICTURES = {"image/png": "png", "image/jpeg": "jpg", "image/webp": "webp", "image/gif": "gif"}
TEXTS = {
    HTML: "html",
    "text/markdown": "md",
    "text/latex": "tex",
    SVG: "svg",
    "application/json": "json",
    "application/geo+json": "geojson",
    "application/javascript": "js",
    PLOTLY: "plotly.json",
    **dict.fromkeys(VEGA_LITE, "vl.json"),
}
