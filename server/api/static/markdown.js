// Markdown to elements while it streams in. Built node by node: nothing is ever parsed as HTML.
//
// A line that has ended is rendered once and never touched again, so the work grows with the text
// and a reader's selection stays. The line that is being written is shown as far as it goes, and
// taken back when more of it comes. Spans (bold, code, links) end with their line.

/** Of one line: what is longer is shown in pieces, so that the work of each frame has a bound. */
const MAX_PIECE = 2000;
/** Of lists and quotes in each other, and of spans; what is deeper is plain text. */
const MAX_DEPTH = 6;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*)|)$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const MARKER = /^( *)([-*+]|(\d{1,9})[.)])( +|$)/;
const DIVIDER = /^ *\|?(?: *:?-+:? *\|)* *:?-+:? *\|? *$/;
const LINK = /!?\[([^[\]]*)\]\(((?:[^()\s]|\([^()\s]*\))*)(?: +"[^"]*")?\)/y;
const ANGLE_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const LINE_BREAK = /<br *\/?>/iy;
const BARE_LINK = /https?:\/\/[^\s<>"`]*[^\s<>"`.,;:!?'*_)\]}]/y;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);

/** Renders into `element`, which is empty. */
export class Markdown {
  #journal = new Journal();
  #blocks;
  #rest = ""; // of the line that has not ended
  #isPiece = false; // its beginning has been rendered

  constructor(element) {
    this.#blocks = new Blocks(element, this.#journal, 0);
  }

  /** More of the text. */
  write(text) {
    this.#journal.takeBack();
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    for (const line of lines) {
      this.#pieces(line);
      this.#isPiece = false;
    }
    this.#rest = this.#pieces(this.#rest, true);
    this.#journal.begin();
    if (this.#rest) this.#render(this.#rest);
  }

  /** Renders a line; one that is `open` without its last piece, which is returned. */
  #pieces(line, open = false) {
    let rest = line;
    while (rest.length > MAX_PIECE) {
      const end = rest.lastIndexOf(" ", MAX_PIECE) + 1 || MAX_PIECE;
      this.#render(rest.slice(0, end));
      this.#isPiece = true;
      rest = rest.slice(end);
    }
    if (!open) this.#render(rest);
    return rest;
  }

  #render(text) {
    if (this.#isPiece) this.#blocks.more(text);
    else this.#blocks.line(text);
  }
}

/** Every change, so that those since `begin` can be taken back. */
class Journal {
  #undo = null;

  begin() {
    this.#undo = [];
  }

  takeBack() {
    const undo = this.#undo ?? [];
    this.#undo = null;
    while (undo.length) undo.pop()();
  }

  append(parent, ...nodes) {
    parent.append(...nodes);
    this.#undo?.push(() => nodes.forEach((node) => node.remove()));
  }

  replace(old, node) {
    old.replaceWith(node);
    this.#undo?.push(() => node.replaceWith(old));
  }

  set(object, name, value) {
    const before = object[name];
    object[name] = value;
    this.#undo?.push(() => (object[name] = before));
  }
}

/**
 * The blocks in `element`. `open` is the last one while lines may belong to it:
 * `{kind, element}` and what its kind needs to know.
 */
class Blocks {
  open = null;

  constructor(element, journal, depth) {
    Object.assign(this, { element, journal, depth });
  }

  /** One whole line. */
  line(text) {
    const { open } = this;
    if (open?.kind === "code") this.#code(text, open);
    else if (!text.trim()) this.#blank(open);
    else if (!this.#continues(text, open)) this.#begin(text);
  }

  /** More of the line before. */
  more(text) {
    const { open } = this;
    if (open?.blocks) open.blocks.more(text);
    else if (open?.kind === "code") this.journal.append(open.element, new Text(text));
    else if (open) this.#inline(open.element, text);
    else this.#begin(text);
  }

  /** Whether a fence is open in here. */
  get isCode() {
    return this.open?.kind === "code" || Boolean(this.open?.blocks?.isCode);
  }

  /** Whether a paragraph is open in here. */
  get isParagraph() {
    return this.open?.kind === "paragraph" || Boolean(this.open?.blocks?.isParagraph);
  }

  #blank(open) {
    if (open?.kind === "list") open.blocks.line("");
    else this.journal.set(this, "open", null);
  }

  #code(text, open) {
    const fence = FENCE.exec(text);
    if (fence && !fence[2] && fence[1].startsWith(open.fence)) this.journal.set(this, "open", null);
    else this.journal.append(open.element, new Text(`${unindented(text, open.indent)}\n`));
  }

  #continues(text, open) {
    if (open?.kind === "list") return this.#continuesList(text, open);
    if (open?.kind === "quote") {
      const quote = QUOTE.exec(text);
      if (quote) open.blocks.line(quote[1]);
      return Boolean(quote);
    }
    if (open?.kind === "table" && text.includes("|")) {
      this.#row(open, "td", text);
      return true;
    }
    if (open?.kind !== "paragraph" || this.#isBeginning(text)) return false;
    if (open.header !== null && DIVIDER.test(text) && this.#table(open, text)) return true;
    this.journal.append(open.element, document.createElement("br"));
    this.#inline(open.element, text.trim());
    this.journal.set(open, "header", null);
    return true;
  }

  #continuesList(text, open) {
    const indent = text.search(/\S/);
    if (open.blocks.isCode || indent >= open.content || indent > open.indent + 1) {
      open.blocks.line(unindented(text, open.content));
      return true;
    }
    const marker = MARKER.exec(text);
    if (marker && !RULE.test(text)) {
      if (Boolean(marker[3]) !== open.isOrdered) return false;
      this.#item(open.element, marker, text);
      return true;
    }
    const isLazy = open.blocks.isParagraph && !this.#isBeginning(text);
    if (isLazy) open.blocks.line(text);
    return isLazy;
  }

  #isBeginning(text) {
    return [FENCE, HEADING, RULE, QUOTE, MARKER].some((kind) => kind.test(text));
  }

  #begin(text) {
    const nests = this.depth < MAX_DEPTH;
    const fence = FENCE.exec(text);
    if (fence) return this.#fence(fence, text.search(/\S/));
    const heading = HEADING.exec(text);
    if (heading) return this.#heading(heading);
    if (RULE.test(text)) return this.#add(null, document.createElement("hr"));
    const quote = nests && QUOTE.exec(text);
    if (quote) return this.#quote(quote[1]);
    const marker = nests && MARKER.exec(text);
    if (marker) return this.#list(marker, text);
    const element = document.createElement("p");
    this.#add({ kind: "paragraph", element, header: text.includes("|") ? text : null }, element);
    this.#inline(element, text.trim());
  }

  /** Adds a block; `open` says which lines belong to it. */
  #add(open, element) {
    this.journal.append(this.element, element);
    this.journal.set(this, "open", open);
  }

  #fence([, fence, language], indent) {
    const box = made("div", "code");
    const head = made("div", "code-head");
    const copy = made("button", "link copy-code");
    copy.type = "button";
    copy.append("Copy");
    head.append(made("span", "", language), copy);
    const pre = document.createElement("pre");
    const element = document.createElement("code");
    pre.append(element);
    box.append(head, pre);
    this.#add({ kind: "code", element, fence, indent }, box);
  }

  #heading([, marks, text]) {
    // The page has the only heading of the first level.
    const element = document.createElement(`h${Math.min(6, marks.length + 1)}`);
    this.#add(null, element);
    this.#inline(element, (text ?? "").trim());
  }

  #quote(text) {
    const element = document.createElement("blockquote");
    const blocks = new Blocks(element, this.journal, this.depth + 1);
    this.#add({ kind: "quote", element, blocks }, element);
    blocks.line(text);
  }

  #list(marker, text) {
    const element = document.createElement(marker[3] ? "ol" : "ul");
    if (marker[3]) element.start = Number(marker[3]);
    this.#add(null, element);
    this.#item(element, marker, text);
  }

  #item(element, [all, { length: indent }, { length: width }, number, { length: space }], text) {
    const item = document.createElement("li");
    const blocks = new Blocks(item, this.journal, this.depth + 1);
    this.journal.append(element, item);
    const content = indent + width + (space >= 1 && space <= 4 ? space : 1);
    const open = { kind: "list", element, blocks, indent, content, isOrdered: Boolean(number) };
    this.journal.set(this, "open", open);
    blocks.line(text.slice(all.length));
  }

  #table(open, divider) {
    const marks = cellsOf(divider);
    if (marks.length !== cellsOf(open.header).length) return false;
    const box = made("div", "table");
    const table = document.createElement("table");
    const aligns = marks.map((mark) =>
      mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "",
    );
    box.append(table);
    const rows = { kind: "table", element: table, aligns };
    this.journal.replace(open.element, box);
    this.journal.set(this, "open", rows);
    this.#row(rows, "th", open.header);
    return true;
  }

  #row({ element, aligns }, kind, text) {
    const row = document.createElement("tr");
    const cells = cellsOf(text);
    aligns.forEach((align, i) => {
      const cell = made(kind, align);
      addSpans(cell, cells[i] ?? "", 0);
      row.append(cell);
    });
    this.journal.append(element, row);
  }

  #inline(element, text) {
    const spans = document.createDocumentFragment();
    addSpans(spans, text, 0);
    this.journal.append(element, ...spans.childNodes);
  }
}

function made(name, className, text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(text);
  return element;
}

function unindented(text, most) {
  const indent = text.search(/\S/);
  return text.slice(Math.min(indent < 0 ? text.length : indent, most));
}

function cellsOf(row) {
  const inner = row.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim());
}

/** Adds the text of a line, with its spans, to `parent`. */
function addSpans(parent, text, depth) {
  const missing = new Set(); // marks that do not come again in this text
  let plain = "";
  let at = 0;
  while (at < text.length) {
    const span = spanAt(text, at, missing, depth);
    if (!span) {
      plain += text[at];
      at += 1;
    } else if (typeof span.node === "string") {
      plain += span.node;
      at = span.end;
    } else {
      parent.append(plain, span.node);
      plain = "";
      at = span.end;
    }
  }
  parent.append(plain);
}

/** The span that begins at `at`: its node and its end; or null. */
function spanAt(text, at, missing, depth) {
  switch (text[at]) {
    case "\\": {
      const next = text[at + 1];
      return next && PUNCTUATION.test(next) ? { node: next, end: at + 2 } : null;
    }
    case "`":
      return codeAt(text, at, missing);
    case "*":
    case "_":
    case "~":
      return depth < MAX_DEPTH ? stressAt(text, at, missing, depth) : null;
    case "!":
    case "[":
      return linkAt(LINK, text, at, ([, words, address]) => [words.replace(/[`*]/g, ""), address]);
    case "<":
      LINE_BREAK.lastIndex = at;
      if (LINE_BREAK.test(text)) return { node: document.createElement("br"), end: LINE_BREAK.lastIndex };
      return linkAt(ANGLE_LINK, text, at, ([, address]) => [address, address]);
    case "h":
      if (at > 0 && WORD.test(text[at - 1])) return null;
      return linkAt(BARE_LINK, text, at, ([address]) => [address, address]);
    default:
      return null;
  }
}

function codeAt(text, at, missing) {
  let begin = at;
  while (text[begin] === "`") begin += 1;
  const mark = text.slice(at, begin);
  let end = missing.has(mark) ? -1 : text.indexOf(mark, begin);
  while (end >= 0 && text[end + mark.length] === "`") {
    let next = end;
    while (text[next] === "`") next += 1;
    end = text.indexOf(mark, next);
  }
  if (end < 0) {
    missing.add(mark);
    return { node: mark, end: begin };
  }
  const inner = text.slice(begin, end);
  const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
  return { node: made("code", "", isPadded ? inner.slice(1, -1) : inner), end: end + mark.length };
}

const STRESS = { 1: ["em"], 2: ["strong"], 3: ["strong", "em"] };

function stressAt(text, at, missing, depth) {
  const char = text[at];
  let begin = at;
  while (text[begin] === char) begin += 1;
  const mark = text.slice(at, begin);
  const asText = { node: mark, end: begin };
  const names = char === "~" ? (mark.length === 2 ? ["del"] : null) : STRESS[mark.length];
  if (!names || missing.has(mark) || !text[begin] || /\s/.test(text[begin])) return asText;
  if (char === "_" && at > 0 && WORD.test(text[at - 1])) return asText;
  const end = closeOf(text, begin, mark);
  if (end < 0) {
    missing.add(mark);
    return asText;
  }
  const outer = document.createElement(names[0]);
  const inner = names[1] ? outer.appendChild(document.createElement(names[1])) : outer;
  addSpans(inner, text.slice(begin, end), depth + 1);
  return { node: outer, end: end + mark.length };
}

/** Where a run of exactly `mark` ends what has begun before `from`, or -1. */
function closeOf(text, from, mark) {
  const [char] = mark;
  for (let at = text.indexOf(char, from); at >= 0; at = text.indexOf(char, at)) {
    let end = at;
    while (text[end] === char) end += 1;
    const isClose = text[at - 1] !== "\\" && !/\s/.test(text[at - 1]);
    const isInWord = char === "_" && WORD.test(text[end] ?? "");
    if (isClose && !isInWord) {
      if (end - at === mark.length) return at;
      // As `**a *b***` does, where the last one ends the outer span.
      if (end - at === 3 && mark.length < 3) return mark.length === 2 ? at + 1 : at;
    }
    at = end;
  }
  return -1;
}

function linkAt(pattern, text, at, parts) {
  pattern.lastIndex = at;
  const found = pattern.exec(text);
  if (!found) return null;
  const [words, address] = parts(found);
  const end = at + found[0].length;
  if (!isSafe(address)) return { node: found[0], end };
  const link = made("a", "", words || address);
  link.href = address;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  return { node: link, end };
}

/** Whether an address leads to the web, and not to a script or into this server. */
function isSafe(address) {
  return URL.canParse(address) && PROTOCOLS.has(new URL(address).protocol);
}
