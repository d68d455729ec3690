// What changes how the page looks: dark or light, and the underlining of unlikely words.

const THEME_NAME = "everstream.theme";
const DARK = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : DARK.matches;
}

/** Makes `button` switch between dark and light. A choice that the system makes too is not kept. */
export function watchTheme(button) {
  const show = () => button.setAttribute("aria-pressed", String(isDark()));
  button.addEventListener("click", () => {
    const wantsDark = !isDark();
    if (wantsDark === DARK.matches) {
      delete root.dataset.theme;
      localStorage.removeItem(THEME_NAME);
    } else {
      root.dataset.theme = wantsDark ? "dark" : "light";
      localStorage.setItem(THEME_NAME, root.dataset.theme);
    }
    show();
  });
  DARK.addEventListener("change", show);
  show();
}

/** Makes `button` switch the underlining. */
export function watchUnlikely(button) {
  button.addEventListener("click", () => {
    const isOn = root.classList.toggle("surprising");
    button.setAttribute("aria-pressed", String(isOn));
  });
}
