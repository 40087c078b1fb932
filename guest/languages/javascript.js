// Runs JavaScript for guest/kernels/hosted.py, which describes the messages. Node.js 20 or newer.
//
// Code is evaluated through V8's inspector in its REPL mode: `let` and `const` may be declared again, `await` works at
// the top level, and the value of the last statement is known.
'use strict';

const events = require('node:events');
const fs = require('node:fs');
const inspector = require('node:inspector');
const module_ = require('node:module');
const net = require('node:net');
const path = require('node:path');
const { pathToFileURL } = require('node:url');
const util = require('node:util');
const { promiseHooks } = require('node:v8');
const { Worker } = require('node:worker_threads');

const ORDERS = 3, EVENTS = 4;
const HANDLED_MS = 150; // for the main thread to handle a signal; if it does not, code keeps it busy
const SOONEST_MS = 1, LATEST_MS = 50; // between two looks for pending work
// What a script waits for before it ends. Servers and their connections live on between runs.
const PENDING = /^(Timeout|Immediate|FSReq|GetAddrInfo|ProcessWrap|TCPConnect|Zlib|MessagePort|RandomBytes|Scrypt|PBKDF2)/;
const QUOTED = /(["'])(?:\\[^]|(?!\1)[^\\\n])*\1|`(?:\\[^]|[^`\\])*`|\/\/.*|\/\*[^]*?\*\//;

const session = new inspector.Session();
session.connect();

function send(word, ...parts) {
  const data = parts.map((part) => (Buffer.isBuffer(part) ? part : Buffer.from(String(part))));
  let left = Buffer.concat([Buffer.from([word, ...data.map((part) => part.length)].join(' ') + '\n'), ...data]);
  while (left.length) left = left.subarray(fs.writeSync(EVENTS, left));
}

// ------------------------------------------------------------ what code sees

class Exit {
  constructor(code) {
    this.code = code;
  }
}

process.exit = (code) => {
  const exit = new Exit(Number(code ?? process.exitCode ?? 0));
  current?.finish(() => send('exited', exit.code));
  throw exit; // code must not go on
};

// A message of the interpreter may be overtaken by output that is still in a stream's buffer.
for (const stream of [process.stdout, process.stderr]) stream._handle?.setBlocking?.(true);

let input;
Object.defineProperty(process, 'stdin', {
  get: () => (input ??= fs.createReadStream(null, { fd: 0, autoClose: false })),
  configurable: true,
});

const require_ = module_.createRequire(path.join(process.cwd(), 'code.js'));
Object.assign(globalThis, {
  require: require_,
  __import: (name, options) =>
    import(/^\.{0,2}\//.test(name) ? pathToFileURL(path.resolve(name)).href : resolved(String(name)), options),
  display: (value, mime = 'text/plain') =>
    send('show', mime, typeof value === 'string' || Buffer.isBuffer(value) ? value : inspect(value)),
});

function resolved(name) {
  // Packages are looked for where the code is, not where this program is.
  if (/^(node|file|data):/.test(name) || module_.builtinModules.includes(name)) return name;
  return pathToFileURL(require_.resolve(name)).href;
}

function inspect(value) {
  return util.inspect(value, { depth: 4, maxArrayLength: 200, maxStringLength: 20000 });
}

function seed(hex) {
  // sfc32, instead of V8's generator, which cannot be seeded.
  let [a, b, c, d] = hex.match(/.{8}/g).map((word) => parseInt(word, 16));
  const next = () => {
    const t = (((a + b) | 0) + d) | 0;
    d = (d + 1) | 0;
    a = b ^ (b >>> 9);
    b = (c + (c << 3)) | 0;
    c = ((c << 21) | (c >>> 11)) + t | 0;
    return t >>> 0;
  };
  for (let i = 0; i < 12; i++) next();
  Math.random = () => ((next() >>> 5) * 67108864 + (next() >>> 6)) / 9007199254740992;
}

// ------------------------------------------------------------ source code

function withoutImports(code) {
  // Scripts have no import statements, so each becomes a call.
  const statement = /^([ \t]*)import\s+(?:([\w$*{][^'";]*?)\s+from\s+)?(['"][^'"\n]+['"])[^\S\n]*;?/gm;
  return code.replace(statement, (_all, indent, names, from) => {
    const call = `await __import(${from});`;
    if (!names) return indent + call;
    const [, first, rest] = /^([\w$]+)?\s*,?\s*([^]*)$/.exec(names);
    const space = /^\*\s*as\s+([\w$]+)$/.exec(rest)?.[1];
    const listed = /^\{([^]*)\}$/.exec(rest)?.[1].replace(/\bas\b/g, ':') ?? '';
    const parts = [first && `default: ${first}`, listed.trim()].filter(Boolean).join(', ');
    if (!space) return `${indent}var {${parts}} = ${call}`;
    return `${indent}var ${space} = ${call}${first ? ` var {default: ${first}} = ${space};` : ''}`;
  });
}

function withImportCalls(code) {
  // Code of the inspector may not import.
  if (!/\bimport\s*\(/.test(code)) return code;
  return code.replace(new RegExp(`${QUOTED.source}|(?<![\\w$.])import(?=\\s*\\()`, 'g'), (found) =>
    found === 'import' ? '__import' : found,
  );
}

function withoutTypes(code) {
  for (const mode of ['strip', 'transform'])
    try {
      return module_.stripTypeScriptTypes?.(code, { mode }) ?? code;
    } catch {
      // Code with enums has to be transformed; other code is no TypeScript, either.
    }
  return code;
}

// ------------------------------------------------------------ one run

let current; // the run

class Run {
  constructor(number, round) {
    this.round = round;
    this.name = `cell-${number}.js`;
    this.before = pending();
    this.ended = new Promise((resolve) => (this.finish = resolve));
  }

  async run(code) {
    const tell = this.round === stopped ? tellInterrupted : await Promise.race([this.evaluate(code), this.ended]);
    current = undefined;
    tell();
  }

  async evaluate(code) {
    let found = await evaluate(code, this.name);
    if (found.isSyntaxError) {
      // Only now, because most code needs no change, and a change may be wrong.
      const changed = withoutImports(withoutTypes(code));
      const again = changed === code ? found : await evaluate(changed, this.name);
      if (!again.isSyntaxError) found = again;
    }
    if (found.terminated) return tellInterrupted;
    try {
      if ('error' in found) throw found.error;
      const value = await found.value;
      if (value !== undefined && !isHandle(value)) send('show', 'text/plain', inspect(value));
    } catch (error) {
      return () => (error instanceof Exit ? send('exited', error.code) : tellError(error));
    }
    return this.settle();
  }

  async settle() {
    // Wait for what the code has left to do, as a script would.
    for (let wait = SOONEST_MS; more(pending(), this.before); wait = Math.min(2 * wait, LATEST_MS))
      await new Promise((resolve) => setTimeout(resolve, wait));
    return () => send('done');
  }

  fail(error) {
    this.finish(() => (error instanceof Exit ? send('exited', error.code) : tellError(error)));
  }
}

const unsettled = new Set(); // the promises of evaluations
function evaluate(code, name) {
  const expression = `${withImportCalls(code)}\n//# sourceURL=${name}`;
  return new Promise((resolve) => {
    // Node.js crashes if an evaluation's promise, the first one that it creates, is collected before it settles.
    let promise;
    const stop = promiseHooks.onInit((created) => {
      promise ??= created;
      stop();
    });
    const options = { expression, replMode: true, objectGroup: 'run' };
    session.post('Runtime.evaluate', options, (_error, found) => {
      unsettled.delete(promise);
      resolve(describe(found));
      session.post('Runtime.releaseObjectGroup', { objectGroup: 'run' }); // else the inspector keeps every value
    });
    stop();
    unsettled.add(promise);
  });
}

function describe(found) {
  if (!found) return { terminated: true };
  const { exceptionDetails: thrown, result } = found;
  if (!thrown) return { value: valueOf(result) };
  // Errors of the compiler have no stack besides this program's own.
  const isSyntaxError = thrown.exception.className === 'SyntaxError' && thrown.scriptId && !thrown.stackTrace;
  return { error: valueOf(thrown.exception), isSyntaxError };
}

function isHandle(value) {
  // Timers, servers, streams: code calls the function for its effect, and the object is long.
  return value instanceof events || /^(Timeout|Immediate)$/.test(value?.constructor?.name);
}

function valueOf(remote) {
  // Return the value that the inspector describes.
  const { objectId, unserializableValue, value } = remote;
  let taken;
  globalThis[TAKE] = (value) => (taken = value);
  session.post('Runtime.callFunctionOn', {
    functionDeclaration: `function (value) { globalThis[Symbol.for('${TAKE.description}')](value); }`,
    arguments: [objectId ? { objectId } : unserializableValue ? { unserializableValue } : { value }],
    objectId: root,
  });
  delete globalThis[TAKE];
  return taken;
}

const TAKE = Symbol.for('mcp-sandbox.take');
let root; // the inspector's name of the global object
session.post('Runtime.evaluate', { expression: 'globalThis' }, (_error, found) => (root = found.result.objectId));

function pending() {
  const counts = {};
  for (const kind of process.getActiveResourcesInfo()) if (PENDING.test(kind)) counts[kind] = (counts[kind] ?? 0) + 1;
  return counts;
}

function more(now, before) {
  return Object.entries(now).some(([kind, count]) => count > (before[kind] ?? 0));
}

function tellError(error) {
  if (!(error instanceof Error)) {
    const text = inspect(error);
    return send('error', 'Uncaught', text, `Uncaught ${text}`);
  }
  const own = /\(?(node:|\S*\/guest\/languages\/javascript\.js)/;
  const lines = String(error.stack ?? error).split('\n');
  const trace = lines.filter((line) => !(/^\s+at /.test(line) && (own.test(line) || /at new Promise/.test(line))));
  for (let cause = error.cause, depth = 0; cause !== undefined && depth < 5; cause = cause?.cause, depth++)
    trace.push(`Caused by: ${cause instanceof Error ? cause.stack.split('\n')[0] : inspect(cause)}`);
  send('error', error.name ?? 'Error', error.message ?? '', trace.join('\n'));
}

function tellInterrupted() {
  send('error', 'Interrupted', 'the code was stopped', 'Interrupted: the code was stopped');
}

for (const event of ['uncaughtException', 'unhandledRejection'])
  process.on(event, (error) => {
    if (error instanceof Exit && !current) return;
    if (current) current.fail(error);
    else process.stderr.write(`Uncaught ${error?.stack ?? inspect(error)}\n`);
  });

// ------------------------------------------------------------ interrupts

// Descriptor 5 says which round an interrupt belongs to, so it stops no later run; the signal does not. Another thread
// reads it. This one handles its message between two callbacks. If code keeps this thread busy, the other ends that code.
const counting = new Int32Array(new SharedArrayBuffer(4)); // the first round whose interrupts still count
let stopped; // the last round with an interrupt
process.on('SIGINT', () => {});

function skipTo(round) {
  Atomics.store(counting, 0, Math.max(Atomics.load(counting, 0), round));
  Atomics.notify(counting, 0);
}

const watcher = new Worker(
  `const { Session } = require('node:inspector');
   const { parentPort, workerData: [counting, wait] } = require('node:worker_threads');
   const session = new Session();
   session.connectToMainThread();
   let round = 0;
   new (require('node:net').Socket)({ fd: 5, readable: true, writable: false }).on('data', (data) => {
     for (const byte of data) {
       if (byte === 0) { round++; continue; }
       parentPort.postMessage(round);
       const until = Date.now() + wait;
       for (let before; (before = Atomics.load(counting, 0)) <= round; )
         if (Atomics.wait(counting, 0, before, until - Date.now()) === 'timed-out') {
           session.post('Runtime.terminateExecution');
           break;
         }
     }
   });`,
  { eval: true, workerData: [counting, HANDLED_MS], stdout: false, stderr: false },
);
watcher.on('message', (round) => {
  skipTo(round + 1);
  stopped = round;
  if (current?.round === round) current.finish(tellInterrupted);
});
watcher.unref();

// ------------------------------------------------------------ orders

const take = {
  run: (number, code, round) => {
    input = undefined;
    current = new Run(number, Number(round));
    skipTo(current.round);
    current.run(code).catch((error) => send('error', 'InternalError', String(error), String(error?.stack)));
  },
  seed,
  set: (name, value) => (process.env[name] = value),
  unset: (name) => delete process.env[name],
};

let held = Buffer.alloc(0);
new net.Socket({ fd: ORDERS, readable: true, writable: false })
  .on('data', (data) => {
    held = Buffer.concat([held, data]);
    for (;;) {
      const end = held.indexOf(10);
      if (end < 0) return;
      const [word, ...sizes] = held.subarray(0, end).toString().split(' ');
      const starts = sizes.map(Number).reduce((at, size) => [...at, at.at(-1) + size], [end + 1]);
      if (held.length < starts.at(-1)) return;
      const parts = sizes.map((_size, i) => held.subarray(starts[i], starts[i + 1]).toString());
      held = held.subarray(starts.at(-1));
      take[word](...parts);
    }
  })
  .on('close', () => process.reallyExit(0));
send('ready');
