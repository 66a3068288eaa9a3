use serde_json::{Value, json};

use super::*;
use crate::{
    client::{
        fixtures::{client_with, policy, policy_of, web},
        secret_state::SecretHashes,
    },
    error::ErrorKind,
};

/// The labels of the namespaces in these tests: the label `team` is the part of the name before the first hyphen. The
/// labels of the namespace `unknown` are not known.
struct Labels;

impl NamespaceLabels for Labels {
    fn labels(&self, namespace: &str) -> Option<BTreeMap<String, String>> {
        let mut labels = implied_labels(namespace);
        labels.insert("team".to_owned(), namespace.split('-').next().unwrap_or_default().to_owned());
        (namespace != "unknown").then_some(labels)
    }
}

fn hashes(current: &str) -> Credentials {
    Credentials::Created(CreatedSecret::Stored(SecretHashes { current: current.to_owned(), previous: None }))
}

fn candidate(namespace: &str, name: &str, fields: Value) -> Candidate {
    let client = client_with(namespace, name, fields);
    Candidate {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: client.metadata.uid.clone().unwrap(),
        client: Ok(Arc::new(client)),
        credentials: hashes("hash"),
    }
}

fn own(name: &str, fields: Value) -> Candidate {
    candidate("identity", name, fields)
}

fn granting_all() -> ClientPolicy {
    policy_of(json!({ "clients": { "namespaces": { "from": "All" } } }))
}

fn reasons(selected: &[Selected]) -> Vec<Option<Reason>> {
    selected.iter().map(|one| one.refusal.as_ref().map(|refusal| refusal.reason)).collect()
}

fn served(selected: &[Selected]) -> Vec<RenderedClient> {
    selected.iter().filter_map(|one| one.rendered.clone()).collect()
}

/// Makes the selection. The published document has the clients `last`.
fn select_after(policy: &ClientPolicy, candidates: &[Candidate], last: &[RenderedClient]) -> Vec<Selected> {
    select(policy, candidates, &Labels, last)
}

fn select_first(policy: &ClientPolicy, candidates: &[Candidate]) -> Vec<Selected> {
    select_after(policy, candidates, &[])
}

/// Selects one Client that was edited. In the published document, the Client has the fields `before`.
fn select_edited(policy: &ClientPolicy, before: Value, now: Candidate) -> Selected {
    let last = served(&select_first(policy, &[candidate(&now.namespace, &now.name, before)]));
    assert_eq!(last.len(), 1);
    select_after(policy, &[now], &last).remove(0)
}

#[test]
fn a_client_in_the_namespace_of_the_app_needs_no_grant() {
    let selected = select_first(&policy(), &[own("a", json!({})), candidate("monitoring", "b", json!({}))]);
    assert_eq!(reasons(&selected), [None, Some(Reason::NotGranted)]);
    assert!(selected[0].refusal.is_none() && selected[1].rendered.is_none());
    assert_eq!(served(&selected)[0].client_id.as_str(), "identity.a");
}

#[test]
fn a_grant_is_for_all_namespaces_or_for_those_with_labels() {
    let candidates = [candidate("a-one", "x", json!({})), candidate("b-one", "x", json!({})), own("x", json!({}))];
    let granted = |namespaces: Value| {
        let policy = policy_of(json!({ "clients": { "namespaces": namespaces } }));
        reasons(&select_first(&policy, &candidates)).iter().map(Option::is_none).collect::<Vec<_>>()
    };
    assert_eq!(granted(json!({ "from": "All" })), [true, true, true]);
    assert_eq!(granted(json!({ "from": "Same" })), [false, false, true]);
    let team = json!({ "from": "Selector", "selector": { "matchLabels": { "team": "a" } } });
    assert_eq!(granted(team), [true, false, true]);
    let name = json!({ "matchLabels": { "kubernetes.io/metadata.name": "b-one" } });
    assert_eq!(granted(json!({ "from": "Selector", "selector": name })), [false, true, true]);
}

#[test]
fn a_namespace_matches_no_selector_while_its_labels_are_not_known() {
    let granted = |namespaces: Value| {
        let policy = policy_of(json!({ "clients": { "namespaces": namespaces } }));
        let selected =
            select_first(&policy, &[candidate("a-one", "x", json!({})), candidate("unknown", "x", json!({}))]);
        reasons(&selected).iter().map(Option::is_none).collect::<Vec<_>>()
    };
    for expression in [
        json!({ "key": "env", "operator": "DoesNotExist" }),
        json!({ "key": "env", "operator": "NotIn", "values": ["test"] }),
    ] {
        let selector = json!({ "matchExpressions": [expression] });
        assert_eq!(granted(json!({ "from": "Selector", "selector": selector })), [true, false]);
    }
    assert_eq!(granted(json!({ "from": "Selector", "selector": {} })), [true, false]);
    assert_eq!(granted(json!({ "from": "All" })), [true, true]);
}

#[test]
fn an_app_without_pages_has_no_clients() {
    let policy = policy_of(json!({ "pages": { "mode": "Disabled" }, "clients": { "namespaces": { "from": "All" } } }));
    let selected = select_first(&policy, &[own("a", json!({})), candidate("monitoring", "b", json!({}))]);
    assert_eq!(reasons(&selected), [Some(Reason::PagesOff); 2]);
    assert_eq!(served(&selected), []);
}

#[test]
fn a_withdrawn_grant_and_disabled_pages_take_effect_immediately() {
    let candidates = [candidate("monitoring", "a", json!({}))];
    let last = served(&select_first(&granting_all(), &candidates));
    assert_eq!(last.len(), 1);
    let off = json!({ "pages": { "mode": "Disabled" }, "clients": { "namespaces": { "from": "All" } } });
    for (policy, reason) in [(policy(), Reason::NotGranted), (policy_of(off), Reason::PagesOff)] {
        let selected = select_after(&policy, &candidates, &last);
        assert_eq!((reasons(&selected), served(&selected)), (vec![Some(reason)], Vec::new()));
        assert!(!needs_last(&selected));
    }
}

#[test]
fn a_client_that_is_gone_is_not_served() {
    let last = served(&select_first(&policy(), &[own("a", json!({}))]));
    assert_eq!(select_after(&policy(), &[], &last), []);
    // A new Client of the same name inherits nothing, even if its spec is invalid.
    let mut new = own("a", json!({ "scopes": ["email"] }));
    new.uid = "another".to_owned();
    assert_eq!(served(&select_after(&policy(), &[new], &last)), []);
}

#[test]
fn a_client_with_an_invalid_new_spec_stays_served_as_it_was() {
    let invalid = own("a", json!({ "displayName": "New", "scopes": ["email"] }));
    let first = select_first(&policy(), std::slice::from_ref(&invalid));
    assert_eq!((reasons(&first), first[0].rendered.is_some()), (vec![Some(Reason::InvalidSpec)], false));
    assert!(needs_last(&first), "the published document can have it");
    let selected = select_edited(&policy(), json!({ "displayName": "Old" }), invalid);
    assert_eq!(selected.refusal.map(|refusal| refusal.reason), Some(Reason::InvalidSpec));
    assert_eq!(selected.rendered.unwrap().display_name, "Old");
}

#[test]
fn a_client_that_cannot_be_read_stays_served_as_it_was() {
    let mut unreadable = own("a", json!({}));
    unreadable.client = Err("spec: unknown variant".to_owned());
    let selected = select_edited(&policy(), json!({ "displayName": "Old" }), unreadable);
    assert_eq!(selected.refusal.unwrap().message, "spec: unknown variant");
    assert_eq!(selected.rendered.unwrap().display_name, "Old");
}

#[test]
fn a_client_that_stays_served_gets_its_current_secret_unless_its_method_changes() {
    let invalid = |credentials: Credentials| {
        let client = own("a", json!({ "scopes": ["email"] }));
        select_edited(&policy(), json!({}), Candidate { credentials, ..client }).rendered.unwrap().authentication
    };
    let secret = |sha256: &str| RenderedClientAuthentication::Secret { sha256: sha256.to_owned(), previous: None };
    assert_eq!(invalid(hashes("rotated")), secret("rotated"));
    let pending = Credentials::Created(CreatedSecret::Pending);
    assert_eq!(invalid(pending), RenderedClientAuthentication::Unresolved);
    // The new spec, which is not accepted, makes the Client a public client. It keeps its last secret.
    assert_eq!(invalid(Credentials::None), secret("hash"));
    // The new spec, which is not accepted, declares keys that do not exist. The Client keeps its last secret.
    let mut keys = web(json!({ "authentication": "PrivateKeyJWT", "jwksRef": { "name": "a", "key": "b" } }));
    keys["scopes"] = json!(["email"]);
    let missing = Credentials::Keys(Err(FieldError::new(Reason::ConfigMapNotFound, "spec.web.jwksRef", "create it")));
    let edited = Candidate { credentials: missing, ..own("a", keys) };
    assert_eq!(select_edited(&policy(), json!({}), edited).rendered.unwrap().authentication, secret("hash"));
    // The current secret cannot be read, because the API server does not respond. The Client keeps its last secret.
    assert_eq!(invalid(Credentials::Unread(ErrorKind::Unavailable)), secret("hash"));
}

#[test]
fn a_client_keeps_its_last_secret_while_the_api_server_does_not_respond() {
    let client = || own("a", json!({}));
    let last = served(&select_first(&policy(), &[client()]));
    let unread = |kind: ErrorKind, generation: i64| {
        let mut edited = client_with("identity", "a", json!({}));
        edited.metadata.generation = Some(generation);
        let candidate = Candidate { client: Ok(Arc::new(edited)), credentials: Credentials::Unread(kind), ..client() };
        let selected = select_after(&policy(), &[candidate], &last).remove(0);
        (selected.refusal, selected.unresolved.len(), selected.rendered.unwrap().authentication)
    };
    let hash = RenderedClientAuthentication::Secret { sha256: "hash".to_owned(), previous: None };
    assert_eq!(unread(ErrorKind::Unavailable, 1), (None, 0, hash));
    // A Client that was edited since it was accepted last is not served with its last secret. The same applies to a
    // Client if the operator lacks the permission to read its Secret.
    let unresolved = (None, 1, RenderedClientAuthentication::Unresolved);
    assert_eq!(unread(ErrorKind::Unavailable, 2), unresolved);
    assert_eq!(unread(ErrorKind::Forbidden, 1), unresolved);
}

#[test]
fn a_client_with_an_unresolved_secret_is_not_refused() {
    let client = Candidate { credentials: Credentials::Created(CreatedSecret::Pending), ..own("a", json!({})) };
    let selected = select_first(&policy(), &[client]).remove(0);
    assert_eq!((selected.refusal, selected.unresolved.len()), (None, 1));
    assert_eq!(selected.rendered.unwrap().authentication, RenderedClientAuthentication::Unresolved);
}

#[test]
fn a_client_that_is_left_unread_is_refused_and_does_not_block_its_client_id() {
    let unread = || Candidate { credentials: Credentials::LeftUnread, ..own("a", json!({ "clientID": "grafana" })) };
    let selected = select_first(&policy(), &[unread(), own("b", json!({ "clientID": "grafana" }))]);
    assert_eq!(reasons(&selected), [Some(Reason::TooManyClients), None]);
    assert_eq!(selected[0].rendered, None);
    // A Client with a mistake in its spec is refused because of the mistake.
    let invalid = Candidate { credentials: Credentials::LeftUnread, ..own("a", json!({ "scopes": ["email"] })) };
    assert_eq!(reasons(&select_first(&policy(), &[invalid])), [Some(Reason::InvalidSpec)]);
}

#[test]
fn a_client_with_a_client_id_that_the_app_no_longer_allows_is_not_kept() {
    // The App now has an audience that is equal to the client ID.
    let policy = policy_of(json!({ "tokens": { "audiences": ["grafana"] } }));
    let fields = json!({ "clientID": "grafana" });
    let last = served(&select_first(&super::super::fixtures::policy(), &[own("a", fields.clone())]));
    assert_eq!(last.len(), 1);
    let selected = select_after(&policy, &[own("a", fields)], &last);
    assert_eq!((reasons(&selected), served(&selected)), (vec![Some(Reason::InvalidSpec)], Vec::new()));
}

#[test]
fn the_oldest_of_several_clients_with_one_client_id_is_accepted() {
    let with_id = || json!({ "clientID": "grafana" });
    let selected = select_first(&policy(), &[own("a", with_id()), own("b", with_id())]);
    assert_eq!(reasons(&selected), [None, Some(Reason::ClientIDConflict)]);
    // A Client that is refused for another reason does not block its client ID for others.
    let mut invalid = with_id();
    invalid["scopes"] = json!(["email"]);
    let selected = select_first(&policy(), &[own("a", invalid), own("b", with_id())]);
    assert_eq!(reasons(&selected), [Some(Reason::InvalidSpec), None]);
    // A refused Client that stays served as it was accepted last still blocks its client ID for others.
    let last = served(&select_first(&policy(), &[own("a", with_id())]));
    let mut invalid = with_id();
    invalid["scopes"] = json!(["email"]);
    let selected = select_after(&policy(), &[own("a", invalid), own("b", with_id())], &last);
    assert_eq!(reasons(&selected), [Some(Reason::InvalidSpec), Some(Reason::ClientIDConflict)]);
}

/// Builds Clients of one namespace with small specs.
fn many(namespace: &str, count: usize) -> Vec<Candidate> {
    (0..count).map(|number| candidate(namespace, &format!("c{number}"), json!({}))).collect()
}

/// Returns how many of these Clients are accepted, and checks that the others are refused for this reason.
#[track_caller]
fn accepted(candidates: &[Candidate], reason: Reason) -> usize {
    let reasons = reasons(&select_first(&granting_all(), candidates));
    let accepted = reasons.iter().filter(|refusal| refusal.is_none()).count();
    assert_eq!(reasons[accepted..], vec![Some(reason); reasons.len() - accepted], "the newest are refused");
    accepted
}

#[test]
fn an_app_has_at_most_200_clients() {
    assert_eq!(accepted(&many("identity", 201), Reason::TooManyClients), 200);
}

#[test]
fn a_namespace_other_than_the_apps_own_has_at_most_50_clients() {
    assert_eq!(accepted(&many("monitoring", 51), Reason::TooManyClients), 50);
}

#[test]
fn other_namespaces_have_at_most_half_of_the_clients() {
    let candidates: Vec<_> = ["a", "b", "c"].into_iter().flat_map(|namespace| many(namespace, 40)).collect();
    assert_eq!(accepted(&candidates, Reason::TooManyClients), 100);
    // Clients of the App's own namespace can still use the other half.
    let mut with_own = candidates;
    with_own.extend(many("identity", 101));
    let reasons = reasons(&select_first(&granting_all(), &with_own));
    assert_eq!(reasons[120..].iter().filter(|refusal| refusal.is_none()).count(), 100);
}

/// Returns the fields of a Client with about this many KiB in a document.
fn large(kib: usize) -> Value {
    let url = |number: usize| format!("https://grafana.example.com/{number}/{}", "a".repeat(984));
    web(json!({ "redirectURLs": (0..kib).map(url).collect::<Vec<_>>() }))
}

#[test]
fn a_client_has_at_most_16_kib() {
    let selected = select_first(&policy(), &[own("a", large(15)), own("b", large(17))]);
    assert_eq!(reasons(&selected), [None, Some(Reason::TooLarge)]);
    assert!(selected[1].refusal.as_ref().unwrap().message.contains("and can have 16"));
    let edited = select_edited(&policy(), large(15), own("b", large(17)));
    assert_eq!(edited.rendered.unwrap().redirect_urls.len(), 15, "it stays served as it was");
}

#[test]
fn the_clients_of_an_app_have_at_most_256_kib_together() {
    let clients = |namespace: &str| -> Vec<_> {
        (0..20).map(|number| candidate(namespace, &format!("c{number}"), large(15))).collect()
    };
    for (namespace, limit) in [("identity", MAX_CLIENTS_BYTES), ("monitoring", MAX_CLIENTS_BYTES / 2)] {
        let clients = clients(namespace);
        let one = size(&served(&select_first(&granting_all(), &clients[..1]))[0]);
        assert_eq!(accepted(&clients, Reason::TooManyClients), limit / one, "{namespace}");
    }
}

#[test]
fn an_older_client_that_grows_displaces_the_newest() {
    let small: Vec<_> = (0..20).map(|number| own(&format!("c{number}"), large(12))).collect();
    let before = select_first(&policy(), &small);
    assert!(before.iter().all(|one| one.refusal.is_none()));
    let mut grown = small.clone();
    for (number, client) in grown.iter_mut().enumerate().take(10) {
        *client = own(&format!("c{number}"), large(15));
    }
    let after = select_after(&policy(), &grown, &served(&before));
    assert!(after[..10].iter().all(|one| one.refusal.is_none()));
    assert!(served(&after).iter().map(size).sum::<usize>() <= MAX_CLIENTS_BYTES);
    assert_eq!(after.last().unwrap().rendered, None);
}

#[test]
fn the_message_to_another_namespace_does_not_reveal_whether_the_app_exists() {
    let foreign = client_with("monitoring", "a", json!({}));
    let without_app = refusal_without_app(&foreign);
    let not_granted = select_first(&policy(), &[candidate("monitoring", "a", json!({}))]).remove(0).refusal;
    assert_eq!(Some(without_app), not_granted);
    // An invalid spec of the Client does not reveal whether the App exists either.
    let invalid = candidate("monitoring", "a", json!({ "clientID": "platform" }));
    assert_eq!(reasons(&select_first(&policy(), &[invalid])), [Some(Reason::NotGranted)]);
    let own = refusal_without_app(&client_with("identity", "a", json!({})));
    assert_eq!(own.reason, Reason::AppNotFound);
    assert!(own.message.contains("App platform does not exist"));
}
