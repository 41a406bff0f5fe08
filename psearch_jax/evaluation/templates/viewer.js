"use strict";
// All text goes in through textContent: nothing of an episode is ever parsed as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const labels = Object.fromEntries(data.rows);
  const form = document.getElementById("filters");
  const list = document.getElementById("list");
  const detail = document.getElementById("detail");
  const names = ["row", "kind", "verdict", "flipped", "seen", "order", "text"].filter((name) => form.elements[name]);
  let current = null;
  let ready = false; // only a person changes the address

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function verdict(episode) {
    return episode.em ? "right" : "wrong";
  }

  function tokens(episode) {
    return episode.policy_tokens + episode.observation_tokens;
  }

  // What flipped is counted against the other row's episode of the same question.
  const right = new Map();
  for (const episode of data.episodes) {
    if (!episode.training) right.set(episode.row + "\n" + episode.id, Boolean(episode.em));
  }

  function flipped(episode, wanted) {
    const way = wanted.slice(0, wanted.indexOf(":"));
    const other = right.get(wanted.slice(way.length + 1) + "\n" + episode.id);
    const own = Boolean(episode.em);
    return !episode.training && other !== undefined && own !== other && own === (way === "gained");
  }

  function surprise(episode) {
    let total = 0;
    let count = 0;
    for (const segment of episode.segments) {
      for (const token of segment[2] || []) {
        total -= token[1];
        count += 1;
      }
    }
    return count ? total / count : 0;
  }

  function haystack(episode) {
    const queries = episode.results.flatMap((turn) => turn.queries);
    return [episode.question, episode.answer, ...(episode.golden_answers || []), ...queries].join("\n").toLowerCase();
  }

  function matching(state) {
    const found = data.episodes.filter((episode) =>
      (!state.row || episode.row === state.row) &&
      (!state.kind || episode.kind === state.kind) &&
      (!state.verdict || verdict(episode) === state.verdict) &&
      (!state.flipped || flipped(episode, state.flipped)) &&
      (!state.seen || episode.unseen === (state.seen === "unseen")) &&
      (!state.text || haystack(episode).includes(state.text.toLowerCase())));
    if (state.order === "longest") found.sort((a, b) => tokens(b) - tokens(a));
    if (state.order === "shortest") found.sort((a, b) => tokens(a) - tokens(b));
    if (state.order === "unlikely") found.sort((a, b) => surprise(b) - surprise(a));
    return found;
  }

  function plural(count, one, many) {
    return count + " " + (count === 1 ? one : many || one + "s");
  }

  function mark(episode) {
    const sign = make("span", verdict(episode), episode.em ? "✓" : "✗");
    sign.title = verdict(episode);
    return sign;
  }

  function columns(turn) {
    const grid = make("div", "columns");
    turn.queries.forEach((query, i) => {
      const column = make("div", "column");
      column.append(make("p", "query", query));
      const passages = make("ol");
      for (const [id, score] of turn.passages[i] || []) {
        const [title, text] = data.passages[id];
        const item = make("li");
        if (title) item.append(make("span", "title", title + " · "));
        item.append(text);
        item.title = "passage " + id + ", score " + score;
        passages.append(item);
      }
      column.append(passages.children.length ? passages : make("p", "empty", "no results"));
      grid.append(column);
    });
    return grid;
  }

  function round(number) {
    return String(Math.round(number * 1000) / 1000).replace("-", "−");
  }

  // A token of the policy: the less likely it was, the stronger its line; the numbers are shown on hover and on focus.
  function spell([text, logprob, advantage], episode) {
    const token = make("i", "token", text);
    const given = advantage === undefined ? episode.advantage : advantage;
    token.style.setProperty("--surprise", Math.min(1, -logprob / 3).toFixed(2));
    token.dataset.told = "log-probability " + round(logprob) + " · probability " + round(Math.exp(logprob)) +
      (given === undefined ? "" : " · advantage " + round(given));
    return token;
  }

  const told = make("div", "told");
  told.hidden = true;
  document.body.append(told);
  detail.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".token");
    told.hidden = !token;
    if (!token) return;
    told.textContent = token.dataset.told;
    const box = token.getBoundingClientRect();
    told.style.left = Math.max(8, Math.min(box.left, innerWidth - told.offsetWidth - 8)) + "px";
    told.style.top = box.bottom + 6 + "px";
  });
  detail.addEventListener("pointerleave", () => { told.hidden = true; });
  addEventListener("scroll", () => { told.hidden = true; }, { passive: true });

  function show(episode) {
    current = episode;
    for (const button of list.querySelectorAll("button")) {
      button.setAttribute("aria-current", String(button.episode === episode));
    }
    detail.replaceChildren();
    if (!episode) return;
    detail.append(make("h3", "", episode.question));
    const answers = make("p", "answers");
    answers.append(mark(episode), " ", make("b", "", episode.answer === null ? "no answer" : episode.answer),
      make("span", "empty", "  expected " + (episode.golden_answers || []).join(" or ")));
    detail.append(answers);
    detail.append(make("p", "stats", [
      labels[episode.row], episode.kind + (episode.unseen === true ? ", unseen entities" : ""),
      plural(episode.turns, "turn"), plural(episode.searches, "search", "searches"),
      plural(episode.subqueries, "sub-query", "sub-queries"),
      plural(episode.policy_tokens, "policy token"),
      ...(episode.training ? ["step " + episode.step, "reward " + round(episode.reward)] : []),
      episode.well_formed ? "well formed" : "not well formed", "ended by " + episode.end_reason,
    ].join("  ·  ")));

    const same = data.episodes.filter((other) => other.id === episode.id && other.step === episode.step);
    if (same.length > 1) {
      const others = make("div", "others");
      for (const other of same) {
        const button = make("button");
        button.type = "button";
        button.append(mark(other), " " + labels[other.row]);
        button.setAttribute("aria-pressed", String(other === episode));
        button.onclick = () => show(other);
        others.append(button);
      }
      detail.append(others);
    }

    const legend = make("div", "legend");
    for (const [role, label] of [["prompt", "prompt"], ["policy", "written by the policy (point at a token for its probability)"], ["observation", "search results"]]) {
      legend.append(make("span", "role-" + role, label));
    }
    const transcript = make("pre", "transcript");
    for (const [role, text, drawn] of episode.segments) {
      const part = make("span", "role-" + role, drawn ? undefined : text.replace(/\n$/, ""));
      if (drawn) part.append(...drawn.map((token) => spell(token, episode)));
      transcript.append(part);
    }
    detail.append(legend, transcript);
    episode.results.forEach((turn, i) => {
      const count = turn.queries.length;
      detail.append(make("h4", "", "Search " + (i + 1) + (count > 1 ? ", " + count + " sub-queries at the same time" : "")));
      detail.append(columns(turn));
    });
  }

  function refresh() {
    const state = Object.fromEntries(names.map((name) => [name, form.elements[name].value]));
    const found = matching(state);
    const set = names.filter((name) => state[name]);
    const hash = set.map((name) => name + "=" + encodeURIComponent(state[name])).join("&");
    if (ready) history.replaceState(null, "", "#" + (hash || "episodes"));
    document.getElementById("count").textContent = found.length + " of " + data.episodes.length + " episodes";
    list.replaceChildren();
    fill(found, 0);
    show(found.includes(current) ? current : found[0] || null);
  }

  // Some hundred lines at a time: two thousand at once would make every keystroke slow.
  const SOME = 200;
  function fill(found, start) {
    list.append(...found.slice(start, start + SOME).map((episode) => {
      const button = make("button");
      button.type = "button";
      button.episode = episode;
      button.append(mark(episode), make("span", "", episode.question),
        make("small", "", labels[episode.row] + " · " + episode.kind + " · " + plural(episode.turns, "turn")));
      button.onclick = () => show(episode);
      const item = make("li");
      item.append(button);
      button.setAttribute("aria-current", String(episode === current));
      return item;
    }));
    if (start + SOME < found.length) {
      const more = make("button", "more", (found.length - start - SOME) + " more");
      const item = make("li");
      more.type = "button";
      more.onclick = () => { item.remove(); fill(found, start + SOME); };
      item.append(more);
      list.append(item);
    }
  }

  // A link such as report.html#kind=bridge&verdict=wrong opens the page filtered.
  const given = new URLSearchParams(location.hash.slice(1));
  let filtered = false;
  for (const name of names) {
    if (given.has(name)) {
      form.elements[name].value = given.get(name);
      filtered = true;
    }
  }
  if (!filtered) form.elements.row.value = data.initial;
  form.addEventListener("input", refresh);
  form.addEventListener("submit", (event) => event.preventDefault());
  refresh();
  ready = true;
  document.documentElement.dataset.ready = Math.round(performance.now()); // milliseconds since the page was asked for
  if (filtered) document.getElementById("episodes").scrollIntoView();
})();
