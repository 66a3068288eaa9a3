//! Authorization codes of clients, pushed requests and used assertions: the stored records, their lifetimes, and
//! concurrent uses.

use std::net::Ipv4Addr;

use futures::{StreamExt, TryStreamExt, stream};
use latchkey_server::domain::{
    client::ClientAddress,
    clock::Env,
    openid::{
        claims_request::RequestedClaims,
        code::{
            Authorization, ClientCode, ClientCodeKey, ClientCodeRecord, ExchangedCode, Redemption, StoredClientCode,
        },
        par::{PushedRequest, PushedRequestKey},
        scope::Scopes,
    },
    ports::{ClientCodes, PushedRequests},
    session::{Amr, SessionId},
    user::Epoch,
};
use latchkey_tests::{eventually, redis};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{Fixture, LIMIT, a_user_id, an_app, now, stores};

fn a_key() -> ClientCodeKey {
    ClientCode::generate(&Env::system()).key()
}

fn a_session_id() -> SessionId {
    SessionId(Uuid::from_u128(rand::random()))
}

fn a_record() -> ClientCodeRecord {
    ClientCodeRecord {
        authorization: Authorization {
            client_uid: "uid-1".to_owned(),
            client_id: "tests.grafana".to_owned(),
            redirect_uri: "https://grafana.example.com/callback".to_owned(),
            user: a_user_id(),
            browser_session: a_session_id(),
            epoch: Epoch(1),
            auth_time: now().unix_timestamp(),
            amr: Amr::Password,
            scopes: Scopes::parse_known("openid email"),
            nonce: Some("n-1".to_owned()),
            code_challenge: None,
            claims: RequestedClaims::default(),
        },
        ip: "192.0.2.1".to_owned(),
        user_agent: None,
        expires_at: now().unix_timestamp() + 60,
    }
}

async fn ttl(fixture: &Fixture, name: &str, kind: &str) -> i64 {
    let mut redis = redis::Redis::shared().await.connect().await.unwrap();
    let key = format!("lk:{{{}:{name}}}:{kind}", fixture.app);
    ::redis::cmd("TTL").arg(key).query_async(&mut redis).await.unwrap()
}

#[tokio::test]
async fn a_code_is_found_until_it_expires_and_for_a_day_after_its_exchange() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let (key, record, session) = (a_key(), a_record(), a_session_id());
    stores.store_client_code(app, &key, &record).await.unwrap();
    let exchanged = ExchangedCode::from(&record.authorization);
    let found = stores.find_client_code(app, &key).await.unwrap();
    assert_eq!(found, Some(StoredClientCode::New(Box::new(record))));
    assert!((110..=120).contains(&ttl(&fixture, key.as_str(), "client-code").await));
    assert!(stores.find_client_code(&an_app(), &key).await.unwrap().is_none(), "another App");
    assert!(stores.find_client_code(app, &a_key()).await.unwrap().is_none());

    assert_eq!(stores.redeem_client_code(app, &key, &exchanged, session).await.unwrap(), Redemption::First);
    let again = stores.redeem_client_code(app, &key, &exchanged, a_session_id()).await.unwrap();
    assert_eq!(again, Redemption::Again(session));
    let found = stores.find_client_code(app, &key).await.unwrap();
    assert_eq!(found, Some(StoredClientCode::Exchanged(exchanged, session)), "nothing else is kept");
    assert!((86_000..=86_400).contains(&ttl(&fixture, key.as_str(), "client-code").await));
}

#[tokio::test]
async fn an_unknown_code_is_not_created_by_its_exchange() {
    let fixture = Fixture::new().await;
    let key = a_key();
    let exchanged = ExchangedCode::from(&a_record().authorization);
    let outcome = fixture.stores.redeem_client_code(&fixture.app, &key, &exchanged, a_session_id()).await.unwrap();
    assert_eq!(outcome, Redemption::Unknown);
    assert_eq!(ttl(&fixture, key.as_str(), "client-code").await, -2, "there is no key");
}

#[tokio::test]
async fn only_one_of_fifty_concurrent_exchanges_is_the_first() {
    let fixture = Fixture::new().await;
    let key = a_key();
    fixture.stores.store_client_code(&fixture.app, &key, &a_record()).await.unwrap();
    let mut tasks = JoinSet::new();
    for _ in 0..50 {
        let (stores, app, key, session) = (fixture.stores.clone(), fixture.app.clone(), key.clone(), a_session_id());
        let exchanged = ExchangedCode::from(&a_record().authorization);
        tasks
            .spawn(async move { (session, stores.redeem_client_code(&app, &key, &exchanged, session).await.unwrap()) });
    }
    let outcomes = tasks.join_all().await;
    let firsts: Vec<_> = outcomes.iter().filter(|(_, outcome)| *outcome == Redemption::First).collect();
    let [(first, _)] = firsts[..] else { panic!("{outcomes:?}") };
    let others = outcomes.iter().filter(|(session, _)| session != first);
    assert!(others.into_iter().all(|(_, outcome)| *outcome == Redemption::Again(*first)));
}

#[tokio::test]
async fn an_assertion_can_be_used_only_once_per_client_and_app() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let end = now().unix_timestamp() + 60;
    assert!(stores.use_assertion(app, "uid-1", "j-1", end).await.unwrap());
    assert!(!stores.use_assertion(app, "uid-1", "j-1", end).await.unwrap());
    assert!(stores.use_assertion(app, "uid-1", "j-2", end).await.unwrap());
    assert!(stores.use_assertion(app, "uid-2", "j-1", end).await.unwrap());
    assert!(stores.use_assertion(&an_app(), "uid-1", "j-1", end).await.unwrap());
    let mut tasks = JoinSet::new();
    for _ in 0..20 {
        let (stores, app) = (fixture.stores.clone(), fixture.app.clone());
        tasks.spawn(async move { stores.use_assertion(&app, "uid-1", "j-3", end).await.unwrap() });
    }
    assert_eq!(tasks.join_all().await.into_iter().filter(|is_first| *is_first).count(), 1);
}

#[tokio::test]
async fn the_use_of_an_assertion_waits_for_a_replica() {
    let primary = redis::Redis::start(redis::Options::for_tests()).await.unwrap();
    let options = redis::Options { replica_of: Some(primary.addr()), ..redis::Options::for_tests() };
    let _replica = redis::Redis::start(options).await.unwrap();
    let connection = primary.connect().await.unwrap();
    let info = async |section: &str| -> String {
        let mut connection = connection.clone();
        ::redis::cmd("INFO").arg(section).query_async(&mut connection).await.unwrap()
    };
    eventually("the replica is online", LIMIT, async || {
        info("replication").await.contains("state=online").then_some(())
    })
    .await;
    let stores = stores("postgres://nobody@127.0.0.1:1/none", &primary.url());
    let (app, end) = (an_app(), now().unix_timestamp() + 60);
    // Repeats the call: right after their start, the stores may not yet have a connection on which they can wait for a
    // replica.
    eventually("the server waits", LIMIT, async || {
        assert!(stores.use_assertion(&app, "uid-1", &Uuid::from_u128(rand::random()).to_string(), end).await.unwrap());
        info("commandstats").await.contains("cmdstat_wait:").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_pushed_request_is_found_until_it_is_used() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    for is_public in [false, true] {
        let key = PushedRequestKey::new(&format!("urn:ietf:params:oauth:request_uri:{is_public}"), is_public);
        let request = a_request();
        stores.store_pushed_request(app, &key, &request, client(1)).await.unwrap();
        for _ in 0..2 {
            assert_eq!(stores.find_pushed_request(app, &key).await.unwrap(), Some(request.clone()));
        }
        if !is_public {
            assert!((110..=120).contains(&ttl(&fixture, key.as_str(), "par").await));
        }
        assert_eq!(stores.find_pushed_request(&an_app(), &key).await.unwrap(), None);
        assert!(stores.use_pushed_request(app, &key).await.unwrap());
        assert!(!stores.use_pushed_request(app, &key).await.unwrap());
        assert!(stores.use_pushed_request(&an_app(), &key).await.unwrap(), "another App");
        assert_eq!(stores.find_pushed_request(app, &key).await.unwrap(), None);
    }
}

fn a_request() -> PushedRequest {
    PushedRequest {
        client_uid: "uid-1".to_owned(),
        parameters: vec![("scope".to_owned(), "openid".to_owned()), ("state".to_owned(), "é&=".to_owned())],
        expires_at: now().unix_timestamp() + 60,
    }
}

/// A client address. Each number gives a different one.
fn client(number: u8) -> ClientAddress {
    ClientAddress::from_ip(Ipv4Addr::new(198, 18, 0, number).into())
}

#[tokio::test]
async fn pushed_requests_of_public_clients_displace_only_those_from_the_same_address() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let key = |name: &str, is_public| PushedRequestKey::new(name, is_public);
    let is_found = async |key: &PushedRequestKey| stores.find_pushed_request(app, key).await.unwrap().is_some();
    let (honest, confidential) = (key("honest", true), key("confidential", false));
    stores.store_pushed_request(app, &honest, &a_request(), client(1)).await.unwrap();
    stores.store_pushed_request(app, &confidential, &a_request(), client(2)).await.unwrap();
    let first = key("first", true);
    stores.store_pushed_request(app, &first, &a_request(), client(2)).await.unwrap();
    let (request, keys): (_, Vec<_>) = (a_request(), (0..9_999).map(|n| key(&n.to_string(), true)).collect());
    let stored = stream::iter(&keys).map(|key| stores.store_pushed_request(app, key, &request, client(2)));
    stored.buffer_unordered(64).try_collect::<Vec<()>>().await.unwrap();
    assert!(!is_found(&first).await, "10,000 requests were stored after the honest one");
    for kept in [&honest, &confidential, &keys[9_998]] {
        assert!(is_found(kept).await);
    }
}
