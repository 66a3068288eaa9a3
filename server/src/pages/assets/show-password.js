// Shows and hides the text of password fields. Without scripts, the buttons of the fields stay hidden.
for (const button of document.querySelectorAll(".password button")) {
  const input = button.previousElementSibling;

  const setType = (type) => {
    if (input.type === type) return;
    const { selectionStart, selectionEnd, selectionDirection } = input;
    input.type = type;
    // A new type can move the cursor. Some browsers also focus a field when its cursor is set.
    if (document.activeElement === input) {
      input.setSelectionRange(selectionStart, selectionEnd, selectionDirection);
    }
    // The texts "Show" and "Hide".
    for (const text of button.children) text.hidden = !text.hidden;
  };
  const hide = () => setType("password");

  // A click with a pointer leaves the focus in the field.
  button.addEventListener("mousedown", (event) => event.preventDefault());
  button.addEventListener("click", () => setType(input.type === "password" ? "text" : "password"));
  // Browsers and password managers recognize a password by the type of its field.
  input.form.addEventListener("submit", hide);
  addEventListener("pagehide", hide);
  button.hidden = false;
}
