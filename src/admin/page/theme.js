// Light or dark: the system's choice until the button says otherwise.
import { $ } from "/page/dom.js";

const KEY = "sidestep-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const dark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";

export function startTheme(changed) {
  const kept = localStorage.getItem(KEY);
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
  const show = () => {
    $("theme").setAttribute("aria-pressed", String(dark()));
    changed();
  };
  $("theme").addEventListener("click", () => {
    const next = dark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem(KEY, next);
    show();
  });
  system.addEventListener("change", show);
  show();
}
