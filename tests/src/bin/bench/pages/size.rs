//! What a browser loads to show the login page: the page, its styles, scripts and images.

use std::{collections::BTreeSet, net::SocketAddr};

use anyhow::{Result, ensure};
use http::StatusCode;

use crate::{
    http_client::{FullResponse, exchange, get},
    logins::{Connection, client_address, connect},
    measurements::Bound,
};

/// Maximum size of all responses together, in bytes, with headers and without compression.
const MAX_BYTES: usize = 30_000;
/// Maximum number of requests, without the request for the script: it is deferred, and the page does not need it.
const MAX_REQUESTS: usize = 3;
const MAX_SCRIPTS: usize = 1;

/// Measures an App without a logo: the size of a logo is the team's choice.
pub(super) async fn measure(server: SocketAddr, app: &str) -> Result<Vec<Bound>> {
    let mut connection = connect(server, client_address(0)).await?;
    let page = load(&mut connection, server, &format!("/{app}/login")).await?;
    let resources = resources(&page.text());
    let mut bytes = size(&page);
    println!("login page: {bytes} bytes");
    for path in &resources {
        let resource = load(&mut connection, server, path).await?;
        println!("  {path}: {} bytes", size(&resource));
        bytes += size(&resource);
    }
    println!();
    let scripts = resources.iter().filter(|path| path.ends_with(".js")).count();
    let requests = 1 + resources.len() - scripts;
    Ok(vec![
        Bound::new(
            format!("the login page with its style and script is at most {MAX_BYTES} bytes: {bytes}"),
            bytes <= MAX_BYTES,
        ),
        Bound::new(
            format!("the login page with its style needs at most {MAX_REQUESTS} requests: {requests}"),
            requests <= MAX_REQUESTS,
        ),
        Bound::new(
            format!("the login page has at most {MAX_SCRIPTS} script, which is loaded later: {scripts}"),
            scripts <= MAX_SCRIPTS,
        ),
    ])
}

async fn load(connection: &mut Connection, server: SocketAddr, path: &str) -> Result<FullResponse> {
    let response = exchange(connection, get(server, path, "")?).await?;
    ensure!(response.status == StatusCode::OK, "{path} returned {}", response.status);
    Ok(response)
}

/// The size of the headers and the body.
fn size(response: &FullResponse) -> usize {
    // A header ends with a line break, and has `: ` after its name.
    let headers: usize = response.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    headers + response.body.len()
}

/// The addresses that a browser loads to show a page. Links and forms are not among them.
fn resources(html: &str) -> BTreeSet<String> {
    let tags = html.split('<').filter_map(|rest| rest.split_once('>')).map(|(tag, _)| tag);
    let address = |tag: &str| {
        let attribute = match tag.split_whitespace().next()? {
            "link" => "href",
            "script" | "img" | "source" | "iframe" => "src",
            _ => return None,
        };
        let (_, rest) = tag.split_once(&format!(" {attribute}=\""))?;
        rest.split('"').next().map(|address| address.replace("&amp;", "&"))
    };
    tags.filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_browser_loads_is_counted() {
        let html = "<link rel=\"stylesheet\" href=\"/a.css?x=1&amp;y=2\">\n<a href=\"/b\">b</a><img\nalt=\"\" src=\"/c\">\
                    <script src=\"/d.js\" defer></script><form action=\"/e\"></form><link rel=\"icon\" href=\"/c\">";
        let expected = ["/a.css?x=1&y=2", "/c", "/d.js"].map(str::to_owned);
        assert_eq!(resources(html), BTreeSet::from(expected));
    }
}
