// Sends the form of the page to the application. Without scripts, the button does.
document.forms[0].submit();
