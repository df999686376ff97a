"use strict";
// The viewer of shadow masks. Query t saw token s iff s <= t < evicted(s). Texts are inserted only by textContent.
const $ = (id) => document.getElementById(id);
const make = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};
const tip = document.body.appendChild(make("div", "tip"));
function showTip(event, text) {
  tip.textContent = text;
  tip.style.visibility = "visible";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (event.clientY + 20 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
}
const hideTip = () => { tip.style.visibility = "hidden"; };

const masks = JSON.parse($("masks").textContent);
if (masks.length) viewer();

function viewer() {
  const slider = $("query"), play = $("play"), choice = $("choice"), text = $("text"), heat = $("heat"), count = $("count");
  const triangle = $("triangle"), everyHead = $("all-heads");
  const marks = ["heat-plot", "count-plot"].map((id) => ["query", "point"].map((kind) => $(id).appendChild(make("div", `mark ${kind}`))));
  const borders = ["heat-plot", "count-plot"].map((id) => $(id).appendChild(make("div", "mark border")));
  const layerLines = $("heat-plot").appendChild(make("div", "lines"));
  const rowMark = $("heat-plot").appendChild(make("div", "mark row"));
  // Of one completion: when each head lost each token, and for each token the same numbers of the shown heads, sorted.
  let mask, isTalk, evicted, rows, tokens, spans, lost, shortest, longest;
  let picked = null, timer = null, colours;

  // ---- Colours, from the style sheet: light and dark have their own.
  const hex = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim().split(/\s+/).map((code) =>
    [1, 3, 5].map((place) => parseInt(code.slice(place, place + 2), 16)));
  const mix = (a, b, share) => [0, 1, 2].map((i) => Math.round(a[i] + (b[i] - a[i]) * share));
  const css = (colour) => `rgb(${colour.join(" ")})`;
  const pack = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;  // bytes of a pixel, little-endian
  function readColours() {
    colours = { life: hex("--life") };
    for (const name of ["kept", "gone", "future", "mark", "card"]) colours[name] = hex(`--${name}`)[0];
    for (const box of document.querySelectorAll(".key [data-colour]")) box.style.backgroundColor = css(hex(box.dataset.colour)[0]);
    document.querySelector(".key .ramp").style.backgroundImage = `linear-gradient(to right, ${colours.life.map(css).join(", ")})`;
  }
  // How many queries saw an evicted key, on a logarithmic scale from the shortest life of this completion to the longest.
  function lifeColour(age) {
    const span = Math.log(longest / shortest) || 1;
    const share = Math.min(Math.max(Math.log(Math.max(age, 1) / shortest) / span, 0), 1);
    const place = share * (colours.life.length - 1);
    const below = Math.min(Math.floor(place), colours.life.length - 2);
    return mix(colours.life[below], colours.life[below + 1], place - below);
  }
  function paint(canvas, colourOf) {
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    const pixels = new Uint32Array(image.data.buffer);
    for (let y = 0, place = 0; y < canvas.height; y++) {
      for (let x = 0; x < canvas.width; x++, place++) pixels[place] = colourOf(x, y);
    }
    context.putImageData(image, 0, 0);
  }

  // ---- What the mask says.
  const at = (row, token) => evicted[row * tokens + token];
  const name = (row) => `layer ${Math.floor(row / mask.heads)}, head ${row % mask.heads}`;
  const allRows = () => [...Array(rows).keys()];
  const quoted = (token) => JSON.stringify(mask.pieces[token]);
  // Share of the shown heads that still see a token: those that lose it after this query.
  function share(token, query) {
    const times = lost[token];
    let low = 0, high = times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] > query) high = middle; else low = middle + 1;
    }
    return 1 - low / times.length;
  }
  function pick(row) {
    picked = row;
    const shown = row === null ? allRows() : [row];
    lost = mask.pieces.map((_, token) => Uint32Array.from(shown, (one) => at(one, token)).sort());
    everyHead.disabled = row === null;
    draw();
  }
  function part(token) {
    if (token < mask.prompt) return "prompt";
    if (!isTalk) return "completion";
    return mask.turns[token] ? `turn ${mask.turns[token]}` : "read from the environment";
  }
  function aboutToken(token) {
    const query = +slider.value;
    const lines = [`token ${token} (${part(token)}) ${quoted(token)}`];
    if (token > query) return lines.concat(`not yet written at query ${query}`).join("\n");
    const remember = allRows().filter((row) => query < at(row, token)).length;
    const end = allRows().filter((row) => at(row, token) >= tokens).length;
    const first = allRows().reduce((best, row) => (at(row, token) < at(best, token) ? row : best), 0);
    lines.push(`query ${query}: ${remember} of ${rows} heads still see it`);
    if (at(first, token) < tokens) lines.push(`first forgotten by ${name(first)}: query ${at(first, token)} saw it no more`);
    lines.push(`${end} of ${rows} keep it to the end`);
    return lines.join("\n");
  }
  function aboutKey(row, token) {
    const gone = at(row, token);
    const life = gone >= tokens ? "still there at the end" : `${gone - token} queries saw it; evicted before query ${gone}`;
    const query = +slider.value;
    const kept = mask.pieces.filter((_, other) => other <= query && query < at(row, other)).length;
    return `${name(row)}: ${kept} of ${query + 1} tokens kept at query ${query}\ntoken ${token} ${quoted(token)}\n${life}`;
  }

  // ---- Pictures.
  function draw() {
    const query = +slider.value;
    let kept = 0;
    for (let token = 0; token <= query; token++) kept += share(token, query);
    const number = kept < 10 ? kept.toFixed(1) : String(Math.round(kept));
    const who = picked === null ? "a head sees on average" : `${name(picked)} sees`;
    $("now").textContent = `query ${query} of ${tokens - 1}: ${who} ${number} of ${query + 1} tokens`;
    $("which").textContent = picked === null ? "share of heads that see a token" : name(picked);
    drawText(query);
    drawHeat(query);
    drawCount(query);
    drawTriangle(query);
    for (const [queryMark] of marks) place(queryMark, query);
    rowMark.style.visibility = picked === null ? "hidden" : "visible";
    if (picked !== null) {
      rowMark.style.top = `${picked / rows * 100}%`;
      rowMark.style.height = `${100 / rows}%`;
    }
  }
  function place(element, token) {
    element.style.left = `${token / tokens * 100}%`;
    element.style.width = `${100 / tokens}%`;
  }
  function drawText(query) {
    spans.forEach((span, token) => {
      const seen = token > query ? 0 : share(token, query);
      const kind = token > query ? "future" : seen === 0 ? (wentTogether(token) ? "gone folded" : "gone") : "";
      const kinds = [kind, token < mask.prompt && "prompt", token >= mask.prompt && (mask.turns[token] ? turnOf(token) : "tool"),
        token === query && "now", !mask.pieces[token] && "empty"];
      span.className = kinds.filter(Boolean).join(" ");
      span.style.backgroundColor = seen ? css(mix(colours.card, colours.mark, 0.06 + 0.44 * seen)) : "transparent";
    });
  }
  // Turns of a conversation are underlined in two colours, one after the other.
  const turnOf = (token) => isTalk && (mask.turns[token] % 2 ? "odd-turn" : "even-turn");
  // A fold evicts a token from all heads at once; a budget evicts it per head.
  const wentTogether = (token) => isTalk && rows > 1 && allRows().every((row) => at(row, token) === at(0, token));
  function drawHeat(query) {
    const faded = (colour) => [pack(colour), pack(mix(colour, colours.card, 0.7))];
    const kept = faded(colours.kept), future = faded(colours.future);
    const life = Array.from({ length: tokens + 1 }, (_, age) => faded(lifeColour(age)));
    // What is forgotten still shows, pale, how long it lived.
    const gone = Array.from({ length: tokens + 1 }, (_, age) => faded(mix(lifeColour(age), colours.gone, 0.55)));
    paint(heat, (token, row) => {
      const end = at(row, token);
      const kind = token > query ? future : end >= tokens ? kept : (end <= query ? gone : life)[end - token];
      return kind[picked !== null && row !== picked ? 1 : 0];
    });
  }
  function drawCount(query) {
    const shares = spans.map((_, token) => (token > query ? -1 : share(token, query)));
    const bars = shares.map((seen) => pack(mix(colours.gone, colours.mark, 0.35 + 0.65 * Math.max(seen, 0))));
    const gone = pack(colours.gone), future = pack(colours.future);
    paint(count, (token, y) => {
      if (shares[token] < 0) return future;
      return count.height - y <= Math.ceil(shares[token] * count.height) ? bars[token] : gone;
    });
  }
  // Queries downwards, tokens to the right: the whole mask of one head, or the share of heads that see a token.
  function drawTriangle(query) {
    const size = Math.min(tokens, 420), stride = tokens / size;
    const levels = Array.from({ length: 65 }, (_, level) => mix(colours.gone, colours.kept, level ? 0.12 + 0.88 * level / 64 : 0));
    const plain = levels.map(pack), marked = levels.map((colour) => pack(mix(colour, colours.mark, 0.55)));
    const future = pack(colours.future), line = Math.floor(query / stride);
    triangle.width = triangle.height = size;
    paint(triangle, (x, y) => {
      const token = Math.floor(x * stride), now = Math.floor(y * stride);
      if (token > now) return future;
      return (y === line ? marked : plain)[Math.ceil(64 * share(token, now))];
    });
  }

  // ---- What a person does.
  function point(token) {
    for (const span of text.querySelectorAll(".pointed")) span.classList.remove("pointed");
    if (token !== null) spans[token].classList.add("pointed");
    for (const [, pointMark] of marks) {
      pointMark.style.visibility = token === null ? "hidden" : "visible";
      if (token !== null) place(pointMark, token);
    }
  }
  const leave = () => { point(null); hideTip(); };
  function under(event, canvas) {
    const box = canvas.getBoundingClientRect();
    const inside = (part, most) => Math.max(0, Math.min(most - 1, Math.floor(part * most)));
    return [inside((event.clientX - box.left) / box.width, tokens), inside((event.clientY - box.top) / box.height, rows)];
  }
  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "▶ play";
  }
  function load(index) {
    mask = masks[index];
    isTalk = mask.turns.some((turn, token) => turn === 0 && token >= mask.prompt);
    $("speakers").hidden = !isTalk;
    const bytes = Uint8Array.from(atob(mask.evicted), (character) => character.charCodeAt(0));
    evicted = new Uint32Array(bytes.buffer);  // little-endian, like pixels
    rows = mask.layers * mask.heads;
    tokens = mask.tokens;
    const lives = Array.from(evicted, (end, place) => (end < tokens ? Math.max(end - place % tokens, 1) : 0)).filter(Boolean);
    shortest = lives.reduce((a, b) => Math.min(a, b), tokens);
    longest = lives.reduce((a, b) => Math.max(a, b), shortest);
    $("lives").textContent = lives.length ? `evicted after ${shortest} … ${longest} queries (pale: forgotten by now)` : "nothing was evicted";
    text.textContent = "";
    spans = mask.pieces.map((piece, token) => {
      const span = text.appendChild(make("span", "", piece.replace(/\n/g, "⏎\n") || "·"));
      span.addEventListener("pointermove", (event) => { point(token); showTip(event, aboutToken(token)); });
      span.addEventListener("pointerleave", leave);
      span.addEventListener("click", () => { stop(); slider.value = token; draw(); });
      return span;
    });
    slider.max = tokens - 1;
    slider.value = tokens - 1;
    const height = Math.max(3, Math.min(26, Math.floor(540 / rows)));
    [heat.width, heat.height, count.width, count.height] = [tokens, rows, tokens, 44];
    heat.style.height = `${height * rows}px`;
    count.style.height = "44px";
    for (const border of borders) border.style.left = `${mask.prompt / tokens * 100}%`;
    const layer = `${height * mask.heads}px`;
    layerLines.style.backgroundImage = mask.heads < 2 || height < 4 ? "none" :
      `repeating-linear-gradient(to bottom, transparent 0 calc(${layer} - 1px), var(--card) calc(${layer} - 1px) ${layer})`;
    $("layers").textContent = "";
    const every = Math.max(1, Math.ceil(16 / (height * mask.heads)));  // a name for as many layers as have room
    for (let layer = 0; layer < mask.layers; layer += every) {
      const label = $("layers").appendChild(make("span", "", `layer ${layer}`));
      label.style.top = `${height * mask.heads * (layer + 0.5)}px`;
    }
    pick(null);
  }

  slider.addEventListener("input", () => { stop(); draw(); });
  play.addEventListener("click", () => {
    if (timer !== null) return stop();
    if (+slider.value >= tokens - 1) slider.value = Math.max(mask.prompt - 1, 0);
    play.textContent = "❚❚ pause";
    timer = setInterval(() => {
      slider.value = +slider.value + Math.max(1, Math.round(tokens / 300));
      draw();
      if (+slider.value >= tokens - 1) stop();
    }, 60);
  });
  everyHead.addEventListener("click", () => pick(null));
  heat.addEventListener("pointermove", (event) => {
    const [token, row] = under(event, heat);
    point(token);
    showTip(event, aboutKey(row, token));
  });
  heat.addEventListener("click", (event) => {
    const row = under(event, heat)[1];
    pick(picked === row ? null : row);
  });
  count.addEventListener("pointermove", (event) => {
    const [token] = under(event, count);
    point(token);
    showTip(event, aboutToken(token));
  });
  for (const canvas of [heat, count]) canvas.addEventListener("pointerleave", leave);
  choice.addEventListener("change", () => { stop(); load(+choice.value); });
  masks.forEach((one, index) => { choice.appendChild(make("option", "", one.title)).value = index; });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); draw(); });
  readColours();
  load(0);
}
