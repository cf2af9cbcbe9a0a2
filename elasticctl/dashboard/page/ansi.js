// What programs print for terminals.

import { el } from "./dom.js";

/** Colours and bold as terminals show them, as classes; every other control sequence is left out. */
export function coloured(text) {
  const line = el("span", { class: "text" });
  let [colour, bold] = ["", false];
  for (const [i, part] of text.replace(/\r/g, "").split(/\x1b\[([0-9;?]*[@-~])/).entries()) {
    if (i % 2 === 0) {
      // eslint-disable-next-line no-control-regex
      const words = part.replace(/[\x00-\x08\x0b-\x1f\x7f]/g, "\ufffd");
      if (words) line.append(colour || bold ? el("span", { class: `${colour}${bold ? " bold" : ""}` }, words) : words);
    } else if (part.endsWith("m")) {
      for (const code of part.slice(0, -1).split(";").map(Number)) {
        if (code === 0) [colour, bold] = ["", false];
        else if (code === 1) bold = true;
        else if (code === 22) bold = false;
        else if (code === 39) colour = "";
        else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) colour = `ansi-${code % 10}`;
      }
    }
  }
  return line;
}
