// Where the cells live: both layouts side by side, and what is said of the tile or owner that is looked at.

const MOST_LISTED = 8, MOST_PEERS = 12;

function copiesOf(picture) {  // rows of the data as boxes with sender, receiver and step; null where they are left out
  const dims = picture.source.shape.length;
  return picture.copies && picture.copies.rows && picture.copies.rows.map((row) => ({
    lo: row.slice(0, dims), hi: row.slice(dims, 2 * dims),
    source: row[2 * dims], target: row[2 * dims + 1], step: row[2 * dims + 2], stays: row[2 * dims] === row[2 * dims + 1],
  }));
}

class CellsPart {
  constructor(view) {
    const { picture } = view, sides = picture.target ? ["source", "target"] : ["source"];
    Object.assign(this, { view, picture, copies: copiesOf(picture) });
    const every = sides.flatMap((side) => tilesOf(picture[side]));
    const scales = picture.source.shape.map((size, dim) => scaleOf(every, dim, size));
    this.panels = sides.map((side) => new LayoutPanel(sides.length > 1 ? side : "only", picture[side], scales));
    this.said = el("div", { class: "detail", "aria-live": "polite" });
    const layouts = el("div", { class: `layouts of-${sides.length}` }, ...this.panels.map((panel) => panel.whole));
    this.whole = section(view.id("tiles"), "Where the cells live", "", el("div", {}, layouts, this.said), () => this.table());
    this.whole.querySelector(".swap").before(this.picker());
    for (const panel of this.panels) this.listen(panel);
    this.mark(null);
  }

  picker() {
    const { labels } = this.picture.groups;
    this.pick = el("select", { "aria-label": `Select a ${DATA.owner}` }, el("option", { value: "" }, `every ${DATA.owner}`),
      ...labels.map((label, group) => el("option", { value: group }, called(label))));
    this.pick.addEventListener("change", () => this.view.show(this.pick.value === "" ? null : Number(this.pick.value)));
    return this.pick;
  }

  listen(panel) {
    const at = (event) => {
      const found = event.target.closest(".tile");
      return found && panel.tiles[Number(found.dataset.tile)];
    };
    const look = (event) => { const tile = at(event); if (tile) this.look(panel.side, tile); };
    const away = () => this.mark(this.view.selected);
    const { grid } = panel;
    grid.addEventListener("pointerover", look);
    grid.addEventListener("focusin", look);
    grid.addEventListener("pointerleave", away);
    grid.addEventListener("focusout", away);
    grid.addEventListener("click", (event) => { const tile = at(event); if (tile) this.view.select(tile.holders.groups[0]); });
  }

  // The copies out of a source tile, or into a target tile: what they have of it. Of replicas only those of the owner
  // that is selected, where it is one of them.
  moves(side, tile) {
    const { groups } = tile.holders, { selected } = this.view, first = side === "source";
    const mine = new Set(groups.includes(selected) ? [selected] : groups);
    return this.copies.filter((copy) => mine.has(copy[side]) && !(first && copy.step) && overlap(copy, tile))
      .map((copy) => ({ ...copy, ...common(copy, tile) }));
  }

  look(side, tile) {
    const panel = this.panels.find((one) => one.side === side), other = this.panels.find((one) => one.side !== side);
    const moves = other && this.copies ? this.moves(side, tile) : null;
    panel.light((one) => one === tile);
    panel.outline(moves || []);
    if (other) {
      const meets = (one, move) => one.holders.groups.includes(move[other.side]) && overlap(one, move);
      other.light((one) => (moves ? moves.some((move) => meets(one, move)) : overlap(one, tile)));
      other.outline(moves || [tile]);
    }
    this.said.replaceChildren(this.aboutTile(panel, tile), other ? this.aboutMoves(side, tile, moves) : "");
  }

  aboutTile({ side, layout }, tile) {
    const cells = volume(tile), size = this.picture.itemsize ? [bytes(cells * this.picture.itemsize)] : [];
    const said = [plural(cells, "cell"), ...size, heldBy(layout, tile), ...(layout.merged ? ["several put together"] : [])];
    return el("p", {}, el("b", {}, `${side === "only" ? "" : `${side} `}${boxText(tile)}`), ` ${said.join(" · ")}`);
  }

  aboutMoves(side, tile, moves) {
    const { copies, itemsize, groups } = this.picture;
    if (!moves) {
      const count = plural(copies.total, "copy", "copies");
      return el("p", { class: "note" }, `${count} in all are too many to list here; lit tiles share cells with this one.`);
    }
    const words = ({ stays, source, target, step }) => {
      const [from, to] = [called(groups.labels[source]), called(groups.labels[target])];
      if (stays) return `stays on ${from}`;
      const both = tile.holders.groups.length > 1;
      const ends = both ? `from ${from} to ${to}` : side === "source" ? `to ${to}` : `from ${from}`;
      return step ? `${ends}, handed on` : ends;
    };
    const items = moves.slice(0, MOST_LISTED).map((move) => el("li", { class: move.stays ? "stays" : "" }, words(move), " ",
      el("code", {}, boxText(move)), " ", el("span", { class: "value" }, bytes(volume(move) * itemsize))));
    if (moves.length > MOST_LISTED) items.push(el("li", {}, `and ${moves.length - MOST_LISTED} more`));
    return el("ul", {}, ...items);
  }

  mark(selected) {
    this.pick.value = selected === null ? "" : String(selected);
    for (const panel of this.panels) {
      panel.light(selected === null ? null : (tile) => tile.holders.groups.includes(selected));
      panel.outline(this.elsewhere(panel.side, selected));
    }
    this.said.replaceChildren(...(selected === null ? [this.hint()] : this.aboutOwner(selected)));
  }

  elsewhere(side, selected) {  // what the owner gets from others, in the source; what others get from it, in the target
    if (selected === null || side === "only" || !this.copies) return [];
    const mine = side === "target" ? (copy) => copy.source === selected : (copy) => copy.target === selected && !copy.step;
    return this.copies.filter((copy) => mine(copy) && !copy.stays);
  }

  hint() {
    return el("p", { class: "note" }, "Point at a tile or focus it to see its box and where it goes. "
      + `Click or press Enter to select its ${DATA.owner}; Escape clears.`);
  }

  aboutOwner(group) {
    const { groups, bars, flows } = this.picture;
    const count = (panel) => plural(panel.tiles.filter((tile) => tile.holders.groups.includes(group)).length, "tile");
    const held = this.panels.map((panel) => `${count(panel)} of the ${panel.side === "only" ? "layout" : panel.side}`);
    const head = el("p", {}, el("b", {}, called(groups.labels[group])), ` holds ${held.join(", ")}`);
    if (!bars) return [head];
    const [sent, received, kept] = ["sent", "received", "kept"].map((name) => bytes(bars[name][group]));
    const peers = (verb, mine, theirs) => {
      const all = flows.filter((flow) => flow[mine] === group)
        .map((flow) => `${groups.labels[flow[theirs]]} (${bytes(flow[2])})`);
      const more = all.length > MOST_PEERS ? ` and ${all.length - MOST_PEERS} more` : "";
      return el("li", {}, `${verb}: ${all.slice(0, MOST_PEERS).join(", ") || "nobody"}${more}`);
    };
    return [head, el("ul", {}, el("li", {}, `sends ${sent}, receives ${received}, keeps ${kept}`),
      peers("sends to", 0, 1), peers("receives from", 1, 0))];
  }

  table() {
    return el("div", {}, ...this.panels.map(({ side, layout, tiles }) => {
      const shown = tiles.slice(0, 1000), left = shown.length < tiles.length ? `, the first ${shown.length} tiles` : "";
      const rows = shown.map((tile) => [boxText(tile), heldBy(layout, tile), whole(volume(tile))]);
      return table(`${side === "only" ? "" : `${side}: `}${layout.text}${left}`, ["box", "held", "cells"], rows, [2]);
    }));
  }
}
