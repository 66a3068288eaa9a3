use super::*;

const LIMITS: QuotaLimits = QuotaLimits { apps: 3, bytes: 1000 };

fn owner(namespace: &str, name: &str) -> AppIdOwner {
    AppIdOwner { namespace: namespace.to_owned(), name: name.to_owned() }
}

fn id(id: &str) -> AppId {
    id.parse().unwrap()
}

fn size(total: u64, keys: u64) -> DocumentSize {
    DocumentSize { without_clients: total, keys, clients: 0 }
}

fn secret(id: &str) -> String {
    format!("latchkey-app-{id}")
}

/// Admits a new App of the namespace, and reports its key Secret and document as the watches do.
fn admit(quotas: &Quotas, namespace: &str, name: &str, total: u64) -> Result<(), QuotaExceeded> {
    let admitted = quotas.admit_app(&id(name), &owner(namespace, name), &secret(name), size(total, 10), 0);
    admitted.map_err(|no_room| no_room.exceeded)?;
    quotas.record_keys(&id(name), Some(owner(namespace, name)));
    quotas.record_document(&secret(name), Some((namespace, size(total, 10))));
    Ok(())
}

#[test]
fn a_namespace_has_at_most_its_quota_of_app_ids() {
    let quotas = Quotas::new(LIMITS);
    for name in ["a", "b", "c"] {
        assert_eq!(admit(&quotas, "shop", name, 100), Ok(()));
    }
    assert_eq!(admit(&quotas, "shop", "d", 100), Err(QuotaExceeded::Apps(3)));
    assert_eq!(admit(&quotas, "other", "d", 100), Ok(()), "each namespace has its own quota");
    // A deleted App keeps its appID while its key Secret exists.
    quotas.record_document(&secret("a"), None);
    assert_eq!(admit(&quotas, "shop", "e", 100), Err(QuotaExceeded::Apps(3)));
    quotas.record_keys(&id("a"), None);
    assert_eq!(admit(&quotas, "shop", "e", 100), Ok(()));
}

#[test]
fn an_app_id_that_is_handed_over_counts_towards_the_quota_of_its_new_namespace() {
    let quotas = Quotas::new(LIMITS);
    for name in ["a", "b", "c"] {
        admit(&quotas, "shop", name, 100).unwrap();
    }
    quotas.record_keys(&id("a"), Some(owner("other", "a")));
    assert_eq!(admit(&quotas, "shop", "d", 100), Ok(()));
    assert!(quotas.owns_app_id(&id("a"), "other") && !quotas.owns_app_id(&id("a"), "shop"));
}

#[test]
fn apps_that_are_admitted_before_the_watch_reports_them_do_not_exceed_the_quota_together() {
    let quotas = Quotas::new(LIMITS);
    let admitted = |name: &str| quotas.admit_app(&id(name), &owner("shop", name), &secret(name), size(300, 10), 0);
    assert!(["a", "b", "c"].into_iter().all(|name| admitted(name).is_ok()));
    assert_eq!(admitted("d").unwrap_err().exceeded, QuotaExceeded::Apps(3));
    // An App whose keys could not be created releases its reservation.
    quotas.release_reservations(&id("a"), &secret("a"));
    assert!(admitted("d").is_ok());
    quotas.release_reservations(&id("a"), &secret("a"));
    assert!(admitted("d").is_ok(), "asking again reserves nothing more");
}

#[test]
fn older_apps_have_precedence() {
    let quotas = Quotas::new(LIMITS);
    let admitted = |older_apps| quotas.admit_app(&id("a"), &owner("shop", "a"), &secret("a"), size(1, 0), older_apps);
    assert_eq!(admitted(3).unwrap_err().exceeded, QuotaExceeded::Apps(3));
    assert!(admitted(2).is_ok());
}

#[test]
fn documents_have_at_most_the_quota_of_bytes_together() {
    let quotas = Quotas::new(LIMITS);
    admit(&quotas, "shop", "a", 600).unwrap();
    assert_eq!(admit(&quotas, "shop", "b", 401), Err(QuotaExceeded::Bytes(1000)));
    admit(&quotas, "shop", "b", 400).unwrap();
    let document =
        |total| quotas.admit_document(&secret("a"), "shop", size(total, 10)).map_err(|no_room| no_room.exceeded);
    assert_eq!(document(601), Err(QuotaExceeded::Bytes(1000)));
    assert_eq!(document(600), Ok(()));
    assert_eq!(document(500), Ok(()));
    // If a document becomes smaller, its room is free only after the smaller document is published.
    assert_eq!(
        quotas.admit_document(&secret("b"), "shop", size(401, 10)).unwrap_err().exceeded,
        QuotaExceeded::Bytes(1000)
    );
    quotas.record_document(&secret("a"), Some(("shop", size(500, 10))));
    assert!(quotas.admit_document(&secret("b"), "shop", size(500, 10)).is_ok());
}

#[test]
fn a_document_that_is_reserved_twice_counts_once() {
    let quotas = Quotas::new(LIMITS);
    quotas.admit_app(&id("a"), &owner("shop", "a"), &secret("a"), size(900, 10), 0).unwrap();
    assert!(quotas.admit_document(&secret("a"), "shop", size(900, 10)).is_ok());
    assert!(quotas.admit_document(&secret("a"), "shop", size(1000, 10)).is_ok());
    assert!(quotas.admit_document(&secret("a"), "shop", size(1001, 10)).is_err());
    quotas.release_reservations(&id("a"), &secret("a"));
    assert_eq!(quotas.namespaces().usage.get("shop"), None, "nothing was published");
}

#[test]
fn rotated_keys_are_never_delayed_but_are_counted() {
    let quotas = Quotas::new(LIMITS);
    admit(&quotas, "shop", "a", 1000).unwrap();
    assert!(quotas.is_byte_quota_reached("shop"));
    assert!(quotas.admit_document(&secret("a"), "shop", size(1300, 310)).is_ok());
    quotas.record_document(&secret("a"), Some(("shop", size(1300, 310))));
    assert_eq!(admit(&quotas, "shop", "b", 1), Err(QuotaExceeded::Bytes(1000)));
    // The document is larger than the published one only because of its keys, so it is admitted. In the second
    // assertion, the rest of the document is larger.
    assert!(quotas.admit_document(&secret("a"), "shop", size(1400, 500)).is_ok());
    assert!(quotas.admit_document(&secret("a"), "shop", size(1301, 310)).is_err());
}

#[test]
fn a_lowered_quota_removes_nothing() {
    let before = Quotas::new(LIMITS);
    admit(&before, "shop", "a", 900).unwrap();
    let quotas = Quotas::new(QuotaLimits { apps: 1, bytes: 100 });
    for name in ["a", "b"] {
        quotas.record_keys(&id(name), Some(owner("shop", name)));
        quotas.record_document(&secret(name), Some(("shop", size(900, 10))));
    }
    assert!(quotas.admit_document(&secret("a"), "shop", size(900, 10)).is_ok());
    assert!(quotas.admit_document(&secret("a"), "shop", size(899, 10)).is_ok());
    assert!(quotas.admit_document(&secret("a"), "shop", size(901, 10)).is_err());
}

#[test]
fn waiting_apps_are_admitted_oldest_first_as_far_as_there_is_room() {
    let quotas = Quotas::new(LIMITS);
    for name in ["a", "b", "c"] {
        admit(&quotas, "shop", name, 100).unwrap();
    }
    let at = |second| Some(Timestamp::from_second(second).unwrap());
    let need = Amount { apps: 1, bytes: 100 };
    quotas.add_waiting("shop", "young", at(3), need);
    quotas.add_waiting("shop", "old-2", at(1), need);
    quotas.add_waiting("shop", "old-1", at(1), need);
    quotas.add_waiting("shop", "large", at(0), Amount { apps: 1, bytes: 901 });
    quotas.add_waiting("other", "elsewhere", at(0), Amount { apps: 4, bytes: 0 });
    let admissible = || quotas.admissible("shop");
    assert!(admissible().is_empty());
    quotas.record_keys(&id("a"), None);
    assert_eq!(admissible(), [NamespacedName::new("shop", "old-1")]);
    quotas.record_keys(&id("b"), None);
    assert_eq!(admissible(), [NamespacedName::new("shop", "old-1"), NamespacedName::new("shop", "old-2")]);
    quotas.remove_waiting("shop", "old-1");
    assert_eq!(admissible(), [NamespacedName::new("shop", "old-2"), NamespacedName::new("shop", "young")]);
    assert!(quotas.is_waiting_for_app_id("shop", "young") && !quotas.is_waiting_for_app_id("shop", "old-1"));
    assert!(quotas.admissible("other").is_empty());
}

#[test]
fn the_keys_of_a_document_are_counted_separately() {
    let document = br#"{"format":1,"more":[1,2],"keys":{"signing":[],"hmac":[]}}"#;
    let size = DocumentSize::of(document);
    assert_eq!((size.without_clients, size.keys), (57, r#"{"signing":[],"hmac":[]}"#.len() as u64));
    let deleted = DocumentSize::of(br#"{"format":1,"state":"Deleted"}"#);
    assert_eq!((deleted.without_clients, deleted.keys), (30, 0));
}

#[test]
fn clients_have_a_quota_of_their_own() {
    let quotas = Quotas::new(LIMITS);
    let with_clients = |clients: u64| DocumentSize { clients, ..size(100, 10) };
    quotas.record_document(&secret("a"), Some(("shop", with_clients(600))));
    assert_eq!(quotas.room_for_clients(&secret("a"), "shop"), 1000, "a document does not compete with itself");
    assert_eq!(quotas.room_for_clients(&secret("b"), "shop"), 400);
    assert_eq!(quotas.room_for_clients(&secret("b"), "other"), 1000);
    // Clients never prevent the publication of an App.
    assert!(quotas.admit_document(&secret("b"), "shop", DocumentSize { clients: 400, ..size(900, 10) }).is_ok());
    assert_eq!(quotas.room_for_clients(&secret("c"), "shop"), 0, "the reservation counts");
    quotas.release_reservations(&id("b"), &secret("b"));
    assert_eq!(quotas.room_for_clients(&secret("c"), "shop"), 400);
    quotas.record_document(&secret("a"), None);
    assert_eq!(quotas.room_for_clients(&secret("c"), "shop"), 1000);
}
