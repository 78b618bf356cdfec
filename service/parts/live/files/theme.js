// Sets the theme that was chosen here before, ahead of the first paint. Runs in <head>.
{
  const chosen = localStorage.getItem("inferpool.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
