// A reader of job documents in YAML 1.2, without aliases, tags and texts of several lines; it writes them as JSON.

const MOST = 256 * 1024;
const DEPTH = 16;
const ESCAPES = { 0: "\0", a: "\x07", b: "\b", t: "\t", "\t": "\t", n: "\n", v: "\v", f: "\f", r: "\r", e: "\x1b", " ": " ", '"': '"', "/": "/", "\\": "\\", N: "\x85", _: "\xa0", L: "\u2028", P: "\u2029" };
const CODES = { x: 2, u: 4, U: 8 };

export class NotYaml extends Error {
  constructor(line, message) {
    super(`Line ${line}: ${message}.`);
    this.title = "The document cannot be read";
    this.errors = [];
  }
}

/** The document as JSON: what begins with a brace is returned as it is, for the service to judge. */
export function asJson(text) {
  return /^\s*\{/.test(text) ? text : new Blocks(text).document();
}

/** The lines of block mappings and sequences. Every function returns JSON, so that no number loses a digit. */
class Blocks {
  constructor(text) {
    if (text.length > MOST) throw new NotYaml(1, `there are more than ${MOST} characters; a job document is short`);
    this.lines = [];
    this.at = 0;
    text.split(/\r\n|\r|\n/).forEach((raw, place) => {
      const number = place + 1;
      const line = uncommented(raw).trimEnd();
      const body = line.trimStart();
      if (!body || (body === "---" && !this.lines.length)) return;
      if (/^(---|\.\.\.)(\s|$)|^%/.test(line)) throw new NotYaml(number, "there is more than one document, or a directive");
      if (/^ *\t/.test(line)) throw new NotYaml(number, "a tab begins it; take blanks");
      this.lines.push({ number, indent: line.length - body.length, body });
    });
  }

  document() {
    const first = this.lines[0];
    if (!first) throw new NotYaml(1, "there is no document");
    const made = this.block(first.indent, 1);
    if (this.at < this.lines.length) throw new NotYaml(this.line.number, "it stands further left or right than the lines that it belongs to");
    if (!made.startsWith("{")) throw new NotYaml(first.number, "a job document is a mapping: `kind: …`");
    return made;
  }

  get line() {
    return this.lines[this.at];
  }

  block(indent, depth) {
    if (depth > DEPTH) throw new NotYaml(this.line.number, `it is deeper than ${DEPTH} levels`);
    const parts = [];
    const names = new Set();
    const listed = isItem(this.line.body);
    while (this.line && this.line.indent === indent && isItem(this.line.body) === listed) {
      const { number, body } = this.line;
      if (listed) {
        const rest = body.slice(1).trimStart();
        if (rest && (isItem(rest) || keyOf(rest, number))) {
          // a block that begins beside its dash
          this.lines[this.at] = { number, indent: indent + body.length - rest.length, body: rest };
          parts.push(this.block(this.line.indent, depth + 1));
        } else parts.push(this.value(rest, indent, depth, false));
      } else {
        const key = keyOf(body, number);
        if (!key) throw new NotYaml(number, "it is not `name: value`, or a text of several lines; put it in quotes, on one line");
        if (names.has(key.name)) throw new NotYaml(number, `\`${key.name}\` stands twice in one mapping`);
        names.add(key.name);
        parts.push(`${JSON.stringify(key.name)}: ${this.value(key.rest, indent, depth, true)}`);
      }
    }
    if (this.line && this.line.indent > indent) throw new NotYaml(this.line.number, "it stands further right than the line before, whose value has ended");
    return listed ? `[${parts.join(", ")}]` : `{${parts.join(", ")}}`;
  }

  /** What stands behind a name or a dash, and the lines below that belong to it. */
  value(rest, indent, depth, named) {
    const { number } = this.line;
    this.at += 1;
    if (!rest) {
      const below = this.line;
      const nested = below && (below.indent > indent || (named && below.indent === indent && isItem(below.body)));
      return nested ? this.block(below.indent, depth + 1) : "null";
    }
    const flow = new Flow(rest, number, depth);
    while (flow.open() && this.line && this.line.indent > indent) {
      flow.text += ` ${this.line.body}`;
      this.at += 1;
    }
    return flow.whole();
  }
}

/** The characters of a value: a scalar, or a mapping or list in brackets. */
class Flow {
  constructor(text, number, depth) {
    Object.assign(this, { text, number, depth, at: 0 });
  }

  /** Whether brackets are left open. */
  open() {
    if (!/^[[{]/.test(this.text)) return false;
    const bare = this.text.replace(/"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'/g, "");
    return bare.split(/[[{]/).length > bare.split(/[\]}]/).length;
  }

  whole() {
    const made = this.value(this.depth, false);
    this.blanks();
    if (this.at < this.text.length) this.refuse("something follows the value's end");
    return made;
  }

  refuse(message) {
    throw new NotYaml(this.number, message);
  }

  blanks() {
    while (this.text[this.at] === " " || this.text[this.at] === "\t") this.at += 1;
  }

  value(depth, within) {
    if (depth > DEPTH) this.refuse(`it is deeper than ${DEPTH} levels`);
    this.blanks();
    const first = this.text[this.at];
    if (first === "[" || first === "{") return this.collection(first === "{", depth);
    if (first === '"' || first === "'") return JSON.stringify(this.quoted());
    return plain(this.bare(within), this.number);
  }

  collection(named, depth) {
    const end = named ? "}" : "]";
    const parts = [];
    const names = new Set();
    this.at += 1;
    for (;;) {
      this.blanks();
      if (this.text[this.at] === end) break;
      if (named) {
        const name = /["']/.test(this.text[this.at]) ? this.quoted() : this.bare(true);
        requireName(name, this.number);
        this.blanks();
        if (names.has(name)) this.refuse(`\`${name}\` stands twice in one mapping`);
        names.add(name);
        let value = "null";
        if (this.text[this.at] === ":") {
          this.at += 1;
          this.blanks();
          if (!",}".includes(this.text[this.at] ?? "]")) value = this.value(depth + 1, true);
        }
        parts.push(`${JSON.stringify(name)}: ${value}`);
      } else parts.push(this.value(depth + 1, true));
      this.blanks();
      if (this.text[this.at] === ",") this.at += 1;
      else if (this.text[this.at] !== end) this.refuse(`a bracket is not closed by ${end}, or a comma is missing`);
    }
    this.at += 1;
    return named ? `{${parts.join(", ")}}` : `[${parts.join(", ")}]`;
  }

  quoted() {
    const quote = this.text[this.at];
    let made = "";
    for (this.at += 1; ; this.at += 1) {
      const letter = this.text[this.at];
      if (letter === undefined) this.refuse("a quote is not closed on its line");
      if (letter === quote && quote === "'" && this.text[this.at + 1] === "'") this.at += 1;
      else if (letter === quote) break;
      else if (letter === "\\" && quote === '"') {
        made += this.escaped();
        continue;
      }
      made += letter;
    }
    this.at += 1;
    return made;
  }

  escaped() {
    this.at += 1;
    const letter = this.text[this.at];
    if (Object.hasOwn(ESCAPES, letter)) return ESCAPES[letter];
    const digits = this.text.slice(this.at + 1, this.at + 1 + (CODES[letter] ?? 0));
    const code = Number.parseInt(digits, 16);
    if (!CODES[letter] || digits.length < CODES[letter] || !/^[0-9a-f]+$/i.test(digits) || code > 0x10ffff) this.refuse(`\\${letter ?? ""} is not an escape of a text in double quotes`);
    this.at += digits.length;
    return String.fromCodePoint(code);
  }

  bare(within) {
    const rest = this.text.slice(this.at);
    const end = within ? rest.search(/[,[\]{}]|:(?=[\s,[\]{}]|$)/) : -1;
    const taken = end < 0 ? rest : rest.slice(0, end);
    this.at += taken.length;
    if (!taken.trim()) this.refuse("a value is missing");
    return taken.trim();
  }
}

function isItem(body) {
  return body === "-" || body.startsWith("- ");
}

function keyOf(body, number) {
  if (/^["']/.test(body)) {
    const flow = new Flow(body, number, 0);
    const name = flow.quoted();
    const rest = body.slice(flow.at).trimStart();
    return /^:(\s|$)/.test(rest) ? { name, rest: rest.slice(1).trimStart() } : null;
  }
  const end = body.search(/:(\s|$)/);
  if (end < 0 || /^[[{]/.test(body)) return null;
  const name = body.slice(0, end).trimEnd();
  requireName(name, number);
  return { name, rest: body.slice(end + 1).trimStart() };
}

function requireName(name, number) {
  if (!name || name === "<<" || /^[?&*!|>%@`]/.test(name)) throw new NotYaml(number, "aliases, tags, merges and names of several lines are not read; write the name out");
}

/** A value without quotes, by the core schema of YAML 1.2. */
function plain(text, number) {
  if (/^[&*!]/.test(text)) throw new NotYaml(number, "aliases, anchors and tags are not read; write the value out");
  if (/^[|>]/.test(text)) throw new NotYaml(number, "texts of several lines are not read; put it in quotes, on one line");
  if (/^[%@`,\]}]|^[-?:](\s|$)|:(\s|$)/.test(text)) throw new NotYaml(number, "the value cannot be read; put it in quotes");
  if (/^(null|Null|NULL|~)$/.test(text)) return "null";
  if (/^(true|True|TRUE|false|False|FALSE)$/.test(text)) return text.toLowerCase();
  if (/^0o[0-7]+$|^0x[0-9a-fA-F]+$/.test(text)) return String(BigInt(text));
  if (/^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$/.test(text)) throw new NotYaml(number, `${text} is not a finite number`);
  if (/^[-+]?\d[\d_]*$/.test(text) && text.includes("_")) throw new NotYaml(number, `${text} is a number or a text; leave the underscores out, or put it in quotes`);
  const found = /^([-+]?)(\d*)(\.\d*)?([eE][-+]?\d+)?$/.exec(text);
  if (!found || !/\d/.test(found[2] + (found[3] ?? ""))) return JSON.stringify(text);
  const [, sign, whole, part, exponent] = found;
  const fraction = part === undefined ? "" : part === "." ? ".0" : part;
  return `${sign === "-" ? "-" : ""}${whole.replace(/^0+(?=\d)/, "") || "0"}${fraction}${exponent ?? ""}`;
}

/** A line without its comment. */
function uncommented(line) {
  let quote = null;
  for (let at = 0; at < line.length; at += 1) {
    const letter = line[at];
    if (quote) {
      if (letter === "\\" && quote === '"') at += 1;
      else if (letter === quote) quote = null;
    } else if ((letter === '"' || letter === "'") && /(^|[\s[{,:])$/.test(line.slice(0, at))) quote = letter;
    else if (letter === "#" && (at === 0 || /\s/.test(line[at - 1]))) return line.slice(0, at);
  }
  return line;
}
