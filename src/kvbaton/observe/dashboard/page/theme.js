// Which colours: the system's, or what was chosen here and is remembered. Runs before the first paint.
(() => {
  const root = document.documentElement;
  const choices = ["auto", "light", "dark"];
  const texts = { auto: "follows the system", light: "light", dark: "dark" };

  const stored = () => {
    try {
      const found = localStorage.getItem("kvbaton-theme");
      return choices.includes(found) ? found : "auto";
    } catch {
      return "auto"; // storage is switched off: the choice lasts as long as the page
    }
  };

  const apply = (choice) => {
    root.dataset.theme = choice;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = `Theme: ${choice}`;
      button.setAttribute("aria-label", `Theme: ${texts[choice]}`);
    }
  };

  apply(stored());
  document.addEventListener("DOMContentLoaded", () => {
    apply(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      const next = choices[(choices.indexOf(root.dataset.theme) + 1) % choices.length];
      try {
        localStorage.setItem("kvbaton-theme", next);
      } catch {
        // as above
      }
      apply(next);
    });
  });
})();
