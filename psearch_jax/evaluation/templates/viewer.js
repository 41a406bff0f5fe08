"use strict";
// All text goes in through textContent: nothing of an episode is ever parsed as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const labels = Object.fromEntries(data.rows);
  const form = document.getElementById("filters");
  const list = document.getElementById("list");
  const detail = document.getElementById("detail");
  const names = ["row", "kind", "verdict", "seen", "order", "text"];
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

  function haystack(episode) {
    const queries = episode.results.flatMap((turn) => turn.queries);
    return [episode.question, episode.answer, ...episode.golden_answers, ...queries].join("\n").toLowerCase();
  }

  function matching(state) {
    const found = data.episodes.filter((episode) =>
      (!state.row || episode.row === state.row) &&
      (!state.kind || episode.kind === state.kind) &&
      (!state.verdict || verdict(episode) === state.verdict) &&
      (!state.seen || episode.unseen === (state.seen === "unseen")) &&
      (!state.text || haystack(episode).includes(state.text.toLowerCase())));
    return state.order === "longest" ? found.sort((a, b) => tokens(b) - tokens(a)) : found;
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
      make("span", "empty", "  expected " + episode.golden_answers.join(" or ")));
    detail.append(answers);
    detail.append(make("p", "stats", [
      labels[episode.row], episode.kind + (episode.unseen === true ? ", unseen entities" : ""),
      plural(episode.turns, "turn"), plural(episode.searches, "search", "searches"),
      plural(episode.subqueries, "sub-query", "sub-queries"),
      plural(episode.policy_tokens, "policy token"),
      episode.well_formed ? "well formed" : "not well formed", "ended by " + episode.end_reason,
    ].join("  ·  ")));

    const same = data.episodes.filter((other) => other.id === episode.id);
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
    for (const [role, label] of [["prompt", "prompt"], ["policy", "written by the policy"], ["observation", "search results"]]) {
      legend.append(make("span", "role-" + role, label));
    }
    const transcript = make("pre", "transcript");
    for (const [role, text] of episode.segments) transcript.append(make("span", "role-" + role, text.replace(/\n$/, "")));
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
    list.replaceChildren(...found.map((episode) => {
      const button = make("button");
      button.type = "button";
      button.episode = episode;
      button.append(mark(episode), make("span", "", episode.question),
        make("small", "", labels[episode.row] + " · " + episode.kind + " · " + plural(episode.turns, "turn")));
      button.onclick = () => show(episode);
      const item = make("li");
      item.append(button);
      return item;
    }));
    show(found.includes(current) ? current : found[0] || null);
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
  if (filtered) document.getElementById("episodes").scrollIntoView();
})();
