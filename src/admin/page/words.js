// What the words mean: the picker's own sentences, loaded once.
import { el } from "/page/dom.js";

export const settings = { trace_link: null, version: "", reasons: {}, ineligible: {} };

export const meaning = (word) => (settings.reasons[word] ?? settings.ineligible[word] ?? "").replaceAll("`", "");

/** The route as one word with a colour: a bypass is a local route by policy. */
export const kind = (decision) => (decision.route === "local" && decision.bypass ? "bypass" : decision.route);

export const tag = (decision) => el("span", { class: `tag ${kind(decision)}`, text: kind(decision) });

/** The setting behind a comparison. */
export const KEYS = {
  net_new: "effectiveIslThreshold",
  ratio: "effectiveIslRatioThreshold",
  prompt: "coldBypassBelow",
  prefill_busy: "prefillBusyThreshold",
  decode_busy: "decodeBusyThreshold",
};
