//! A browser without scripts for the hosted pages: it keeps cookies, follows redirects, and sends forms with their
//! hidden fields.

use std::collections::BTreeMap;

use http::{HeaderMap, Method, StatusCode};

use crate::client::{ApiClient, ApiResponse};

/// The maximum number of redirects that a browser follows.
const MAX_REDIRECTS: usize = 10;

/// A browser at one client address. Clones continue with the same cookies, but do not share new ones.
#[derive(Clone, Debug)]
pub struct PageBrowser {
    client: ApiClient,
    /// The values of the cookies by their names.
    pub cookies: BTreeMap<String, String>,
}

/// A page, as the browser shows it after all redirects.
#[derive(Clone, Debug)]
pub struct LoadedPage {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// Path and query.
    pub address: String,
    pub html: String,
    /// The URL of a redirect to another site, which the browser does not follow.
    pub external: Option<String>,
}

/// A form of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageForm {
    /// The path to which the form is sent.
    pub action: String,
    /// The names and values of the form's fields, including hidden fields.
    pub fields: Vec<(String, String)>,
}

// === impl PageBrowser ===

impl PageBrowser {
    /// A new browser without cookies, at the client's address.
    pub fn new(client: ApiClient) -> Self {
        Self { client, cookies: BTreeMap::new() }
    }

    /// Opens a link, and follows redirects.
    pub async fn open(&mut self, path: &str) -> LoadedPage {
        let response = self.get(path).await;
        self.follow(path, response).await
    }

    /// Requests a path without following a redirect.
    pub async fn get(&mut self, path: &str) -> ApiResponse {
        let request = self.client.request(Method::GET, path);
        self.send(request).await
    }

    /// Fills in fields of the form with this action, sends it, and follows redirects. Panics if there is no such form.
    pub async fn submit(&mut self, page: &LoadedPage, action: &str, fields: &[(&str, &str)]) -> LoadedPage {
        let form = page.form(action);
        let mut sent = form.fields.clone();
        for (name, value) in fields {
            sent.retain(|(known, _)| known != name);
            sent.push(((*name).to_owned(), (*value).to_owned()));
        }
        self.press(&PageForm { action: form.action, fields: sent }).await
    }

    /// Sends a form with unchanged fields, and follows redirects.
    pub async fn press(&mut self, form: &PageForm) -> LoadedPage {
        let response = self.post(&form.action, &form.fields, &[]).await;
        self.follow(&form.action, response).await
    }

    /// Sends fields with the `Origin` of the pages, unless `headers` has another one. Does not follow a redirect.
    pub async fn post(&mut self, path: &str, fields: &[(String, String)], headers: &[(&str, &str)]) -> ApiResponse {
        let body = url::form_urlencoded::Serializer::new(String::new()).extend_pairs(fields).finish();
        let mut request = self.client.request(Method::POST, path);
        request = request.header("content-type", "application/x-www-form-urlencoded").body(body);
        if !headers.iter().any(|(name, _)| *name == "origin") {
            request = request.header("origin", self.client.base_url());
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.send(request).await
    }

    /// Removes a cookie with a name that begins with this text. Returns whether there was one.
    pub fn forget(&mut self, name: &str) -> bool {
        let before = self.cookies.len();
        self.cookies.retain(|known, _| !known.starts_with(name));
        self.cookies.len() < before
    }

    async fn send(&mut self, request: reqwest::RequestBuilder) -> ApiResponse {
        let pairs: Vec<String> = self.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let request = if pairs.is_empty() { request } else { request.header("cookie", pairs.join("; ")) };
        let response = self.client.send(request).await;
        for field in response.headers.get_all("set-cookie") {
            let text = field.to_str().expect("a cookie is ASCII");
            let (name, value) = text.split(';').next().and_then(|pair| pair.split_once('=')).expect("a pair");
            if text.contains("Max-Age=0") {
                self.cookies.remove(name);
            } else {
                self.cookies.insert(name.to_owned(), value.to_owned());
            }
        }
        response
    }

    async fn follow(&mut self, path: &str, mut response: ApiResponse) -> LoadedPage {
        let mut address = path.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let location = response.header("location").map(str::to_owned);
            let Some(location) = location.filter(|_| response.status.is_redirection()) else {
                return LoadedPage::new(address, response, None);
            };
            let local = location.strip_prefix(self.client.base_url()).unwrap_or(&location).to_owned();
            if !local.starts_with('/') {
                return LoadedPage::new(address, response, Some(location));
            }
            response = self.get(&local).await;
            address = local;
        }
        panic!("more than {MAX_REDIRECTS} redirects, the last to {address}");
    }
}

// === impl LoadedPage ===

impl LoadedPage {
    fn new(address: String, response: ApiResponse, external: Option<String>) -> Self {
        Self { status: response.status, headers: response.headers, address, html: response.text, external }
    }

    /// The path without the query.
    pub fn path(&self) -> &str {
        self.address.split('?').next().unwrap_or_default()
    }

    /// The error code in `<main data-error>`.
    pub fn error(&self) -> Option<&str> {
        let (_, rest) = self.html.split_once("<main data-error=\"")?;
        rest.split('"').next()
    }

    /// Asserts the path of the page, and that it shows no error.
    #[track_caller]
    pub fn expect_at(self, path: &str) -> Self {
        assert_eq!((self.path(), self.error()), (path, None), "{} {}", self.status, self.html);
        assert_eq!(self.status, StatusCode::OK, "{}", self.html);
        self
    }

    /// Asserts the status and the error code of the page.
    #[track_caller]
    pub fn expect_error(self, status: u16, code: &str) -> Self {
        let found = (self.status.as_u16(), self.error());
        assert_eq!(found, (status, Some(code)), "at {}: {}", self.address, self.html);
        self
    }

    /// The text of the page without tags.
    pub fn text(&self) -> String {
        let (_, body) = self.html.split_once("<body>").unwrap_or(("", &self.html));
        let parts = body.split('<').map(|part| part.split_once('>').map_or(part, |(_, text)| text));
        unescape(&parts.collect::<Vec<_>>().join(" "))
    }

    /// The addresses of all links.
    pub fn links(&self) -> Vec<String> {
        tags(&self.html, "a").filter_map(|tag| attribute(tag, "href")).collect()
    }

    /// All forms, in their order.
    pub fn forms(&self) -> Vec<PageForm> {
        let forms = self.html.split("<form").skip(1).filter_map(|rest| rest.split_once("</form>"));
        forms.map(|(form, _)| PageForm::parse(form)).collect()
    }

    /// The first form with this action. Panics if there is none.
    #[track_caller]
    pub fn form(&self, action: &str) -> PageForm {
        let found = self.forms().into_iter().find(|form| form.action == action);
        found.unwrap_or_else(|| panic!("no form {action} at {}: {}", self.address, self.html))
    }
}

// === impl PageForm ===

impl PageForm {
    fn parse(html: &str) -> Self {
        let (tag, _) = html.split_once('>').unwrap_or((html, ""));
        let action = attribute(tag, "action").unwrap_or_default();
        let field = |tag| Some((attribute(tag, "name")?, attribute(tag, "value").unwrap_or_default()));
        Self { action, fields: tags(html, "input").filter_map(field).collect() }
    }

    /// The value of a field. Panics if there is no such field.
    #[track_caller]
    pub fn value(&self, name: &str) -> &str {
        let found = self.fields.iter().find(|(known, _)| known == name);
        found.map_or_else(|| panic!("no field {name} in {self:?}"), |(_, value)| value.as_str())
    }
}

/// The contents of all tags with this name. Our pages escape `>` in attributes.
fn tags<'a>(html: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    let rests = html.split('<').filter_map(move |rest| rest.strip_prefix(name)?.strip_prefix([' ', '\n']));
    rests.filter_map(|rest| rest.split_once('>').map(|(tag, _)| tag))
}

fn attribute(tag: &str, name: &str) -> Option<String> {
    let tag = format!(" {tag}");
    let (_, rest) = tag.split_once(&format!(" {name}=\""))?;
    rest.split('"').next().map(unescape)
}

fn unescape(text: &str) -> String {
    let entities = [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&#x27;", "'"),
        ("&#39;", "'"),
        ("&#x2f;", "/"),
        // `&amp;` is the last one, so that nothing is unescaped twice.
        ("&amp;", "&"),
    ];
    entities.iter().fold(text.to_owned(), |text, (entity, char)| text.replace(entity, char))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_links_text_and_forms_with_hidden_fields_of_a_page_are_read() {
        let html = "<body><main data-error=\"invalid_code\"><a class=\"x\" href=\"/shop/login?a=1&amp;b=2\">In</a>\n\
                    <form method=\"post\" action=\"/shop/confirm\" novalidate>\n\
                    <input type=\"hidden\" name=\"csrf\" value=\"abc\">\n\
                    <input id=\"code\" name=\"code\" type=\"text\" value=\"&lt;&quot;&amp;lt;\" required>\n\
                    <button>Go</button></form></main></body>";
        let page = LoadedPage {
            status: StatusCode::OK,
            headers: HeaderMap::new(),
            address: "/shop/confirm?code=x".to_owned(),
            html: html.to_owned(),
            external: None,
        };
        assert_eq!((page.path(), page.error()), ("/shop/confirm", Some("invalid_code")));
        assert_eq!(page.links(), ["/shop/login?a=1&b=2"]);
        let form = page.form("/shop/confirm");
        assert_eq!((form.value("csrf"), form.value("code")), ("abc", "<\"&lt;"));
        assert!(page.text().contains("Go") && !page.text().contains("form"));
    }
}
