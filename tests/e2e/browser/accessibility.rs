//! Accessibility of every page in each of its states: the rules of axe-core, and pages on the narrowest screens.

use std::fs;

use latchkey_tests::{browser::Browser, page_tour::PageTour, process};
use serde_json::Value;

const AXE: &str = "tests/axe/node_modules/axe-core/axe.min.js";
/// The number of rules that apply to every page. If fewer rules pass, the run has not checked the page.
const MIN_PASSED_RULES: u64 = 12;
/// The width in CSS pixels at which a page must not scroll to the side (WCAG 2.2, success criterion 1.4.10).
const NARROWEST: u32 = 320;

/// Runs all rules of axe-core, including the WCAG 2.2 rule that is off by default. Returns the number of passed rules,
/// and the violations as texts.
const CHECK: &str = "
    const done = arguments[arguments.length - 1];
    const text = rule => rule.id + ': ' + rule.nodes.map(node => node.html + ' ' + node.failureSummary).join('; ');
    axe.run(document, { rules: { 'target-size': { enabled: true } } }).then(
        result => done({ passed: result.passes.length, violations: result.violations.map(text) }),
        error => done({ passed: 0, violations: [String(error)] }),
    );
";

fn axe() -> String {
    fs::read_to_string(process::root().join(AXE)).expect("axe-core is installed: run `make test`")
}

/// The accessibility violations on the page that the browser shows.
async fn violations(browser: &Browser) -> Vec<String> {
    let result = browser.run_async_script(CHECK).await;
    let violations = result["violations"].as_array().expect("violations").iter();
    let mut violations: Vec<String> = violations.map(|text| text.as_str().unwrap_or_default().to_owned()).collect();
    if result["passed"].as_u64().is_none_or(|passed| passed < MIN_PASSED_RULES) {
        violations.push(format!("only {} rules passed", result["passed"]));
    }
    violations
}

/// Walks through all pages. Returns all violations.
async fn check_all_pages(language: &str) -> Vec<String> {
    let axe = axe();
    let tour = PageTour::start().await.unwrap();
    let browser = Browser::start().await.unwrap();
    let mut faults = Vec::new();
    let walk = tour.walk(&browser, language, async |browser: &Browser, stop: &str| {
        browser.run_script(&axe).await;
        let mut backgrounds: Vec<Value> = Vec::new();
        for (scheme, is_dark) in [("light", false), ("dark", true)] {
            browser.set_dark(is_dark).await;
            backgrounds.push(browser.run_script("return getComputedStyle(document.body).backgroundColor").await);
            let found = violations(browser).await;
            faults.extend(found.into_iter().map(|violation| format!("{stop}, {scheme}: {violation}")));
        }
        if backgrounds[0] == backgrounds[1] {
            faults.push(format!("{stop} is {} in light and dark", backgrounds[0]));
        }
        browser.set_dark(false).await;
        browser.set_width(Some(NARROWEST)).await;
        let hidden = "const page = document.documentElement; return page.scrollWidth - page.clientWidth";
        let hidden = browser.run_script(hidden).await;
        if hidden != 0 {
            faults.push(format!("{stop} is {hidden} pixels too wide for {NARROWEST} pixels"));
        }
        browser.set_width(None).await;
    });
    walk.await.unwrap();
    faults
}

#[tokio::test]
async fn every_page_in_english_is_accessible_in_light_and_dark() {
    let faults = check_all_pages("en").await;
    assert!(faults.is_empty(), "{faults:#?}");
}

#[tokio::test]
async fn every_page_in_german_is_accessible_in_light_and_dark() {
    let faults = check_all_pages("de").await;
    assert!(faults.is_empty(), "{faults:#?}");
}

#[tokio::test]
async fn the_check_finds_a_field_without_a_label() {
    let browser = Browser::start().await.unwrap();
    browser.open("data:text/html,<html lang=en><title>t</title><main><h1>h</h1><input></main></html>").await;
    browser.run_script(&axe()).await;
    let found = violations(&browser).await;
    assert!(found.iter().any(|violation| violation.starts_with("label: ")), "{found:#?}");
}
