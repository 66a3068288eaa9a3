//! The button that shows and hides a password.

use latchkey_tests::{browser::Browser, passwords::PASSWORD};
use serde_json::json;

use crate::pages::{EMAIL, PagesTest};

const BUTTON: &str = ".password button";
/// The width of the narrowest screen in CSS pixels (WCAG 2.2, success criterion 1.4.10).
const NARROWEST: u32 = 320;
/// The minimum width and height of a button in CSS pixels (WCAG 2.2, success criterion 2.5.5).
const MIN_BUTTON_SIZE: u64 = 44;

async fn type_of(browser: &Browser, css: &str) -> String {
    browser.attribute(css, "type").await.expect("a field has a type")
}

#[tokio::test]
async fn a_password_can_be_shown_and_is_hidden_when_the_form_is_sent() {
    let pages = PagesTest::start().await;
    pages.test_app.register_and_confirm(EMAIL).await;
    let browser = Browser::start().await.unwrap();
    browser.open(&pages.url("login")).await;
    browser.fill("#email", EMAIL).await;
    browser.fill("#password", PASSWORD).await;
    assert_eq!(type_of(&browser, "#password").await, "password");
    assert_eq!(browser.text_of(BUTTON).await, "Show");
    assert_eq!(browser.accessible_name(BUTTON).await.as_deref(), Some("Show Password"));
    browser.click(BUTTON).await;
    assert_eq!(type_of(&browser, "#password").await, "text");
    assert_eq!(browser.text_of(BUTTON).await, "Hide");
    assert_eq!(browser.accessible_name(BUTTON).await.as_deref(), Some("Hide Password"));
    browser.click(BUTTON).await;
    assert_eq!(type_of(&browser, "#password").await, "password");
    assert_eq!(browser.text_of(BUTTON).await, "Show");

    // When the user leaves the page, the password is hidden.
    browser.click(BUTTON).await;
    assert_eq!(type_of(&browser, "#password").await, "text");
    browser.run_script("dispatchEvent(new Event('pagehide'))").await;
    assert_eq!(type_of(&browser, "#password").await, "password");
    assert_eq!(browser.text_of(BUTTON).await, "Show");

    browser.click(BUTTON).await;
    assert_eq!(type_of(&browser, "#password").await, "text");
    // This listener of the window runs after the listener of the form, so it sees the field as it is sent.
    let listen = "addEventListener('submit', () =>
        sessionStorage.setItem('sent', document.querySelector('#password').type))";
    browser.run_script(listen).await;
    browser.click("main .primary").await;
    pages.wait_for_page(&browser, "account").await;
    assert_eq!(browser.run_script("return sessionStorage.getItem('sent')").await, "password");
}

#[tokio::test]
async fn showing_a_password_moves_neither_the_focus_nor_the_cursor() {
    let pages = PagesTest::start().await;
    let browser = Browser::start().await.unwrap();
    browser.open(&pages.url("login")).await;
    browser.fill("#password", PASSWORD).await;
    browser.run_script("document.querySelector('#password').setSelectionRange(2, 5)").await;
    let place = "const field = document.activeElement; return [field.id, field.selectionStart, field.selectionEnd]";
    for shown in ["text", "password"] {
        browser.click(BUTTON).await;
        assert_eq!(type_of(&browser, "#password").await, shown);
        assert_eq!(browser.run_script(place).await, json!(["password", 2, 5]), "{shown}");
    }
    // If the user presses the button with the keyboard, the focus stays on the button.
    let press = "const button = document.querySelector('.password button'); button.focus(); button.click();
        return document.activeElement === button";
    for shown in ["text", "password"] {
        assert_eq!(browser.run_script(press).await, true);
        assert_eq!(type_of(&browser, "#password").await, shown);
    }
}

#[tokio::test]
async fn each_password_field_has_its_own_button() {
    let pages = PagesTest::start().await;
    pages.test_app.register_and_confirm(EMAIL).await;
    let browser = Browser::start().await.unwrap();
    browser.open(&pages.url("account/password?lang=de")).await;
    pages.wait_for_page(&browser, "login").await;
    pages.log_in_here(&browser, EMAIL, PASSWORD).await;
    pages.wait_for_page(&browser, "account/password").await;
    let (current, new) = ("#current_password", "#password");
    browser.click(&format!("{current} + button")).await;
    assert_eq!([type_of(&browser, current).await, type_of(&browser, new).await], ["text", "password"]);
    browser.click(&format!("{new} + button")).await;
    browser.click(&format!("{current} + button")).await;
    assert_eq!([type_of(&browser, current).await, type_of(&browser, new).await], ["password", "text"]);
    let name = browser.accessible_name(&format!("{new} + button")).await;
    assert_eq!(name.as_deref(), Some("Verbergen Neues Passwort"));
}

#[tokio::test]
async fn the_button_is_large_and_neither_moves_other_elements_nor_covers_text() {
    // The button must be inside the padding of its field. The browser rounds both widths in `isCut`, so a difference of
    // one pixel does not mean that the text is cut.
    let check = format!(
        "const button = document.querySelector('{BUTTON}');
         const field = button.previousElementSibling;
         const box = button.getBoundingClientRect();
         const end = field.getBoundingClientRect().right - parseFloat(getComputedStyle(field).paddingRight);
         const top = () => document.querySelector('main .primary').getBoundingClientRect().top;
         const before = top();
         button.hidden = true;
         const moved = top() - before;
         button.hidden = false;
         return {{
             isSmall: box.width < {MIN_BUTTON_SIZE} || box.height < {MIN_BUTTON_SIZE},
             coversText: box.left < end,
             isCut: button.scrollWidth > button.clientWidth + 1,
             moved,
         }}"
    );
    let expected = json!({ "isSmall": false, "coversText": false, "isCut": false, "moved": 0 });
    let pages = PagesTest::start().await;
    let browser = Browser::start().await.unwrap();
    for language in ["en", "de"] {
        browser.set_width(Some(NARROWEST)).await;
        browser.open(&pages.url(&format!("login?lang={language}"))).await;
        for state in ["hidden", "shown"] {
            assert_eq!(browser.run_script(&check).await, expected, "{language}, {state}");
            browser.click(BUTTON).await;
        }
    }
}

#[tokio::test]
async fn the_button_is_not_visible_without_scripts() {
    let pages = PagesTest::start().await;
    pages.test_app.register_and_confirm(EMAIL).await;
    let browser = Browser::start_without_scripts().await.unwrap();
    browser.open(&pages.url("login")).await;
    assert_eq!(browser.count(BUTTON).await, 1);
    assert_eq!(browser.text_of(BUTTON).await, "", "the button is not visible");
    let text = browser.text().await;
    assert!(!text.contains("Show") && !text.contains("Hide"), "{text}");
    // The field looks like every other field.
    let style = "const style = css => {
            const field = document.querySelector(css), { width, height } = field.getBoundingClientRect();
            return [width, height, getComputedStyle(field).padding];
        };
        return [style('#password'), style('#email')]";
    let styles = browser.run_script(style).await;
    assert_eq!(styles[0], styles[1]);
    pages.log_in_here(&browser, EMAIL, PASSWORD).await;
    pages.wait_for_page(&browser, "account").await;
}
