//! The files of pages: colors and logo of an App, and the stylesheet and the scripts of all Apps.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method};

use super::{page::Page, responses};
use crate::{
    http::{Ports, error::Problem, request::InboundRequest, response::Response},
    pages::{Asset, FoundAsset, theme_css},
};

const ALLOW: &str = "GET, HEAD";
const CLEAR_SITE_DATA: HeaderName = HeaderName::from_static("clear-site-data");
/// The value of `v` in the link to `theme.css` on the page after a logout. Browsers keep visited pages in memory, even
/// with `no-store`, and the back button would show the account again. The header `Clear-Site-Data` removes these pages,
/// but only when the next page is already shown. Therefore the response with `theme.css` has this header, and the page
/// after the logout does not.
const AFTER_LOGOUT: &str = "logout";

/// Returns `theme.css`, the colors of the App's pages.
pub(super) fn theme<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let version = page.query("v")?;
    let is_current = version == Some(page.branding.theme_version());
    let css = theme_css(&page.settings.theme);
    let mut response = responses::file("text/css; charset=utf-8", css.into(), is_current);
    if version == Some(AFTER_LOGOUT) {
        response.headers_mut().insert(CLEAR_SITE_DATA, HeaderValue::from_static("\"cache\""));
    }
    Ok(response)
}

/// Returns the logo of the App.
pub(super) fn logo<S: Ports>(page: &Page<'_, S>) -> Result<Response, Problem> {
    let logo = page.settings.theme.logo.as_ref().ok_or_else(Problem::not_found)?;
    let is_current = page.query("v")? == page.branding.logo_version();
    Ok(responses::logo(logo.media_type.as_str(), Bytes::copy_from_slice(&logo.bytes), is_current))
}

/// `/assets/{FILE}`. An error is JSON and not a page, because the file belongs to no App.
pub(in crate::http) fn asset(request: &InboundRequest) -> Result<Response, Problem> {
    let FoundAsset { asset, is_current } = Asset::find(request.path_parameter(0)).ok_or_else(Problem::not_found)?;
    if !matches!(request.method, Method::GET | Method::HEAD) {
        return Err(Problem::method_not_allowed(ALLOW));
    }
    Ok(responses::file(asset.content_type, Bytes::from_static(asset.body.as_bytes()), is_current))
}
