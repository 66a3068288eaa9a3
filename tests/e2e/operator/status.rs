//! From `kubectl apply` to Ready, and what the status says on the way.

use latchkey_crds::conditions::{ConditionStatus, ConditionType};
use latchkey_tests::{
    builders::{App, Provider, Relay},
    cluster::Cluster,
};

/// A manifest, applied, is all that it takes: every server has the App, and its users can register.
#[tokio::test]
async fn an_app_that_is_applied_becomes_ready_on_every_server() {
    let install = Cluster::shared().await.install().await;
    let servers = install.serve(2).await;
    let _operator = install.operator().await;
    let github = Provider::new("github", "github");
    let app = App::new("shop").relay(Relay::to(&install.smtp)).provider(&github);
    install.apply_provider(&github).await.unwrap();
    install.apply(&app).await.unwrap();
    install.ready(&app).await;

    for server in &servers {
        let answer =
            install.client_of(server).register(app.id(), "Ada", "ada@example.com", "a quiet harbour at noon").await;
        answer.expect(http::StatusCode::OK);
    }
    let status = install.get(&app).await.unwrap().status.unwrap();
    assert_eq!(status.app_id.as_deref(), Some(app.id()));
    assert_eq!(status.issuer, Some(format!("{}/{}", install.base_url(), app.id())));
    assert_eq!(status.providers[0].callback_url, format!("{}/{}/github/callback", install.base_url(), app.id()));
    assert_eq!(status.signing_keys[0].id, "s1");
    assert_eq!(status.hmac_keys[0].id, "h1");
    for type_ in ConditionType::APP {
        let told = install.condition(&app, type_).await.unwrap();
        assert_eq!(told.status, ConditionStatus::True, "{type_}: {told:?}");
    }
}
