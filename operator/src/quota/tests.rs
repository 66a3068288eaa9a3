use super::*;

const LIMITS: Limits = Limits { apps: 3, bytes: 1000 };

fn holder(namespace: &str, name: &str) -> Holder {
    Holder { namespace: namespace.to_owned(), name: name.to_owned() }
}

fn id(id: &str) -> AppId {
    id.parse().unwrap()
}

fn size(all: u64, keys: u64) -> Size {
    Size { all, keys }
}

fn secret(id: &str) -> String {
    format!("latchkey-app-{id}")
}

/// Admits a new App of that namespace, and reports its key Secret and document as the watches do.
fn admit(quotas: &Quotas, namespace: &str, name: &str, all: u64) -> Result<(), Exceeded> {
    let admitted = quotas.admit_app(&id(name), &holder(namespace, name), &secret(name), size(all, 10), 0);
    admitted.map_err(|(exceeded, _)| exceeded)?;
    quotas.keys(&id(name), Some(holder(namespace, name)));
    quotas.document(&secret(name), Some((namespace, size(all, 10))));
    Ok(())
}

#[test]
fn a_namespace_holds_so_many_app_ids_and_no_more() {
    let quotas = Quotas::new(LIMITS);
    for name in ["a", "b", "c"] {
        assert_eq!(admit(&quotas, "shop", name, 100), Ok(()));
    }
    assert_eq!(admit(&quotas, "shop", "d", 100), Err(Exceeded::Apps(3)));
    assert_eq!(admit(&quotas, "other", "d", 100), Ok(()), "each namespace has its own bound");
    // An App that is gone keeps its appID while its key Secret is there.
    quotas.document(&secret("a"), None);
    assert_eq!(admit(&quotas, "shop", "e", 100), Err(Exceeded::Apps(3)));
    quotas.keys(&id("a"), None);
    assert_eq!(admit(&quotas, "shop", "e", 100), Ok(()));
}

#[test]
fn an_app_id_that_is_handed_over_counts_in_its_new_namespace() {
    let quotas = Quotas::new(LIMITS);
    for name in ["a", "b", "c"] {
        admit(&quotas, "shop", name, 100).unwrap();
    }
    quotas.keys(&id("a"), Some(holder("other", "a")));
    assert_eq!(admit(&quotas, "shop", "d", 100), Ok(()));
    assert!(quotas.holds_id(&id("a"), "other") && !quotas.holds_id(&id("a"), "shop"));
}

#[test]
fn apps_that_are_admitted_at_once_do_not_exceed_the_bound_together() {
    let quotas = Quotas::new(LIMITS);
    let at_once = |name: &str| quotas.admit_app(&id(name), &holder("shop", name), &secret(name), size(300, 10), 0);
    assert!(["a", "b", "c"].into_iter().all(|name| at_once(name).is_ok()));
    assert_eq!(at_once("d").unwrap_err().0, Exceeded::Apps(3));
    // One whose keys could not be made gives its place back.
    quotas.settle(&id("a"), &secret("a"));
    assert!(at_once("d").is_ok());
    quotas.settle(&id("a"), &secret("a"));
    assert!(at_once("d").is_ok(), "asking again takes no second place");
}

#[test]
fn older_apps_come_first() {
    let quotas = Quotas::new(LIMITS);
    let admitted = |ahead| quotas.admit_app(&id("a"), &holder("shop", "a"), &secret("a"), size(1, 0), ahead);
    assert_eq!(admitted(3).unwrap_err().0, Exceeded::Apps(3));
    assert!(admitted(2).is_ok());
}

#[test]
fn documents_have_so_many_bytes_together_and_no_more() {
    let quotas = Quotas::new(LIMITS);
    admit(&quotas, "shop", "a", 600).unwrap();
    assert_eq!(admit(&quotas, "shop", "b", 401), Err(Exceeded::Bytes(1000)));
    admit(&quotas, "shop", "b", 400).unwrap();
    let document = |all| quotas.admit_document(&secret("a"), "shop", size(all, 10)).map_err(|(exceeded, _)| exceeded);
    assert_eq!(document(601), Err(Exceeded::Bytes(1000)));
    assert_eq!(document(600), Ok(()));
    assert_eq!(document(500), Ok(()));
    // What is not published yet makes no room.
    assert_eq!(quotas.admit_document(&secret("b"), "shop", size(401, 10)).unwrap_err().0, Exceeded::Bytes(1000));
    quotas.document(&secret("a"), Some(("shop", size(500, 10))));
    assert!(quotas.admit_document(&secret("b"), "shop", size(500, 10)).is_ok());
}

#[test]
fn a_document_that_is_reserved_twice_counts_once() {
    let quotas = Quotas::new(LIMITS);
    quotas.admit_app(&id("a"), &holder("shop", "a"), &secret("a"), size(900, 10), 0).unwrap();
    assert!(quotas.admit_document(&secret("a"), "shop", size(900, 10)).is_ok());
    assert!(quotas.admit_document(&secret("a"), "shop", size(1000, 10)).is_ok());
    assert!(quotas.admit_document(&secret("a"), "shop", size(1001, 10)).is_err());
    quotas.settle(&id("a"), &secret("a"));
    assert_eq!(quotas.namespaces().usage.get("shop"), None, "nothing was published");
}

#[test]
fn keys_that_rotate_are_never_held_back_and_count() {
    let quotas = Quotas::new(LIMITS);
    admit(&quotas, "shop", "a", 1000).unwrap();
    assert!(quotas.is_full("shop"));
    assert!(quotas.admit_document(&secret("a"), "shop", size(1300, 310)).is_ok());
    quotas.document(&secret("a"), Some(("shop", size(1300, 310))));
    assert_eq!(admit(&quotas, "shop", "b", 1), Err(Exceeded::Bytes(1000)));
    // Less of the author's and more of keys.
    assert!(quotas.admit_document(&secret("a"), "shop", size(1400, 500)).is_ok());
    assert!(quotas.admit_document(&secret("a"), "shop", size(1301, 310)).is_err());
}

#[test]
fn a_bound_that_is_lowered_takes_nothing_away() {
    let before = Quotas::new(LIMITS);
    admit(&before, "shop", "a", 900).unwrap();
    let quotas = Quotas::new(Limits { apps: 1, bytes: 100 });
    for name in ["a", "b"] {
        quotas.keys(&id(name), Some(holder("shop", name)));
        quotas.document(&secret(name), Some(("shop", size(900, 10))));
    }
    assert!(quotas.admit_document(&secret("a"), "shop", size(900, 10)).is_ok());
    assert!(quotas.admit_document(&secret("a"), "shop", size(899, 10)).is_ok());
    assert!(quotas.admit_document(&secret("a"), "shop", size(901, 10)).is_err());
}

#[test]
fn those_that_wait_fit_in_order_of_age_and_only_as_many_as_there_is_room_for() {
    let quotas = Quotas::new(LIMITS);
    for name in ["a", "b", "c"] {
        admit(&quotas, "shop", name, 100).unwrap();
    }
    let at = |second| Some(Timestamp::from_second(second).unwrap());
    let need = Need { apps: 1, bytes: 100 };
    quotas.wait("shop", "young", at(3), need);
    quotas.wait("shop", "old-2", at(1), need);
    quotas.wait("shop", "old-1", at(1), need);
    quotas.wait("shop", "large", at(0), Need { apps: 1, bytes: 901 });
    quotas.wait("other", "elsewhere", at(0), Need { apps: 4, bytes: 0 });
    let admissible = || quotas.admissible("shop");
    assert!(admissible().is_empty());
    quotas.keys(&id("a"), None);
    assert_eq!(admissible(), [Place::new("shop", "old-1")]);
    quotas.keys(&id("b"), None);
    assert_eq!(admissible(), [Place::new("shop", "old-1"), Place::new("shop", "old-2")]);
    quotas.wait_no_more("shop", "old-1");
    assert_eq!(admissible(), [Place::new("shop", "old-2"), Place::new("shop", "young")]);
    assert!(quotas.waits("shop", "young") && !quotas.waits("shop", "old-1"));
    assert!(quotas.admissible("other").is_empty());
}

#[test]
fn the_keys_of_a_document_are_told_apart_from_the_rest() {
    let document = br#"{"format":1,"more":[1,2],"keys":{"signing":[],"hmac":[]}}"#;
    let size = Size::of(document);
    assert_eq!((size.all, size.keys), (57, r#"{"signing":[],"hmac":[]}"#.len() as u64));
    let deleted = Size::of(br#"{"format":1,"state":"Deleted"}"#);
    assert_eq!((deleted.all, deleted.keys), (30, 0));
}
