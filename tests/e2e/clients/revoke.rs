//! Revocation of client tokens.

use http::StatusCode;
use latchkey_tests::passwords::PASSWORD;
use serde_json::json;

use super::{
    ARGOCD, AS_GRAFANA, Auth, EMAIL, GRAFANA, OTHER_SECRET, OpenIdTest, SPA, expect_invalid_client,
    expect_invalid_grant,
};

#[tokio::test]
async fn a_client_can_end_its_session_with_either_token() {
    let test = OpenIdTest::start().await;
    for name in ["refresh_token", "access_token"] {
        let tokens = test.tokens("openid offline_access").await;
        let revoked = test.post("revoke", AS_GRAFANA, &[("token", tokens.string(name))]).await.expect(StatusCode::OK);
        assert_eq!(revoked.body, json!({}));
        expect_invalid_grant(test.refresh(AS_GRAFANA, tokens.string("refresh_token")).await);
        let refused = test.userinfo(tokens.string("access_token")).await;
        refused.expect_error(StatusCode::UNAUTHORIZED, "invalid_token");
        test.post("revoke", AS_GRAFANA, &[("token", tokens.string(name))]).await.expect(StatusCode::OK);
    }
    for unknown in ["x", "lkrc_x", "lkr_x", "a.b.c"] {
        test.post("revoke", AS_GRAFANA, &[("token", unknown)]).await.expect(StatusCode::OK);
    }
    test.post("revoke", AS_GRAFANA, &[]).await.expect_error(StatusCode::BAD_REQUEST, "invalid_request");
}

#[tokio::test]
async fn only_the_client_itself_can_revoke_its_tokens() {
    let test = OpenIdTest::start().await;
    let mut browser = test.logged_in_browser().await;
    let tokens = test.tokens_in(&mut browser, "openid offline_access").await;
    for name in ["refresh_token", "access_token"] {
        let fields = [("token", tokens.string(name))];
        expect_invalid_client(test.post("revoke", Auth::Nothing, &fields).await);
        expect_invalid_client(test.post("revoke", Auth::Basic(GRAFANA, "wrong"), &fields).await);
        expect_invalid_client(test.post("revoke", Auth::Public(GRAFANA), &fields).await);
        expect_invalid_grant(test.post("revoke", Auth::Basic(ARGOCD, OTHER_SECRET), &fields).await);
        expect_invalid_grant(test.post("revoke", Auth::Public(SPA), &fields).await);
    }
    let access_token = json!({ "token": tokens.string("access_token") });
    expect_invalid_client(test.client().post(&test.endpoint("revoke"), &access_token).await);
    test.userinfo(tokens.string("access_token")).await.expect(StatusCode::OK);

    let public = test.public_tokens(&mut browser, "openid").await;
    test.post("revoke", Auth::Public(SPA), &[("token", public.string("refresh_token"))]).await.expect(StatusCode::OK);
    expect_invalid_grant(test.refresh(Auth::Public(SPA), public.string("refresh_token")).await);
}

#[tokio::test]
async fn a_client_cannot_revoke_the_tokens_of_the_app() {
    let test = OpenIdTest::start().await;
    let login = test.client().login(test.test_app.id(), EMAIL, PASSWORD).await.expect(StatusCode::OK);
    for name in ["refresh_token", "token"] {
        expect_invalid_grant(test.post("revoke", AS_GRAFANA, &[("token", login.string(name))]).await);
    }
    test.client().refresh(test.test_app.id(), login.string("refresh_token")).await.expect(StatusCode::OK);
    // A request without client credentials can still revoke the App's own tokens.
    test.post("revoke", Auth::Nothing, &[("token", login.string("token"))]).await.expect(StatusCode::OK);
    expect_invalid_grant(test.client().refresh(test.test_app.id(), login.string("refresh_token")).await);
}
