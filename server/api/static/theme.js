// Before the first paint: the reader's own choice of light or dark, if there is one.
// No module, because modules run too late for that.

(() => {
  const theme = localStorage.getItem("everstream.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
