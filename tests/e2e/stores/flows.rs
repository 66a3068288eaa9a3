//! Flows that no browser holds: as many as may be, and no more.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use futures::{StreamExt, TryStreamExt, stream};
use latchkey_crds::types::AppId;
use latchkey_server::{
    domain::{
        client::ClientAddress,
        clock::Env,
        flow::{Binding, FlowId, FlowState, TooManyFlows},
        ports::{Flows, KeepError},
    },
    store::Stores,
};
use latchkey_tests::redis::Redis as RedisServer;

use super::{Fixture, an_app};

/// Of one client address in a minute (contract, 5).
const MAX_OF_CLIENT: u32 = 30;

fn an_id() -> FlowId {
    FlowState::generate(&Env::system()).id()
}

/// One of many client addresses.
fn client(number: u32) -> ClientAddress {
    ClientAddress::of(Ipv4Addr::from_bits(Ipv4Addr::new(198, 18, 0, 0).to_bits() + number).into())
}

async fn keep(stores: &Stores, app: &AppId, from: ClientAddress) -> Result<FlowId, TooManyFlows> {
    let id = an_id();
    match stores.keep_flow(app, &id, "sealed", from).await {
        Ok(()) => Ok(id),
        Err(KeepError::TooMany(too_many)) => Err(too_many),
        Err(KeepError::Store(error)) => panic!("{error}"),
    }
}

/// A client address in IPv6.
fn subnet(site: u16, net: u16) -> ClientAddress {
    ClientAddress::of(Ipv6Addr::new(0x2001, 0xdb8, site, net, 0, 0, 0, 1).into())
}

async fn keep_all(stores: &Stores, app: &AppId, from: impl Iterator<Item = ClientAddress>) -> Vec<FlowId> {
    let keeping = stream::iter(from).map(|client| keep(stores, app, client)).buffer_unordered(64);
    keeping.try_collect().await.expect("nobody is refused")
}

async fn found(stores: &Stores, app: &AppId, ids: &[FlowId]) -> usize {
    let found = stream::iter(ids).map(|id| stores.find_flow(app, id)).buffer_unordered(64);
    let found: Vec<_> = found.try_collect().await.unwrap();
    found.into_iter().flatten().count()
}

/// What Redis keeps of the App's flows: its keys, each with an end, and how many entries the indexes have.
async fn kept(app: &AppId) -> (usize, [usize; 3]) {
    let mut redis = RedisServer::shared().await.connect().await.unwrap();
    let keys: Vec<String> =
        redis::cmd("KEYS").arg(format!("lk:{{{app}:flows}}:*")).query_async(&mut redis).await.unwrap();
    for key in &keys {
        let left: i64 = redis::cmd("PTTL").arg(key).query_async(&mut redis).await.unwrap();
        assert!((1..=600_000).contains(&left), "{key} ends in {left} ms");
    }
    let mut sizes = [0; 3];
    for (size, (command, index)) in sizes.iter_mut().zip([("ZCARD", "alive"), ("HLEN", "clients"), ("ZCARD", "counts")])
    {
        let key = format!("lk:{{{app}:flows}}:{index}");
        *size = redis::cmd(command).arg(key).query_async(&mut redis).await.unwrap();
    }
    (keys.len(), sizes)
}

#[tokio::test]
async fn whoever_fills_an_apps_places_for_flows_takes_them_from_nobody_else() {
    let fixture = Fixture::new().await;
    let Fixture { stores, app, .. } = &fixture;
    let honest = keep_all(stores, app, (1000..1020).map(client)).await;
    // As many as 34 client addresses may begin in ten minutes, here of ten times as many in one.
    let each = (0..340).flat_map(|number| (0..MAX_OF_CLIENT).map(move |_| client(number)));
    let theirs = keep_all(stores, app, each).await;
    assert_eq!(theirs.len(), 10_200);
    assert_eq!(kept(app).await.1, [10_000, 10_000, 360], "as many as may be, of 340 and of 20");
    assert_eq!(found(stores, app, &honest).await, 20, "who has few keeps them, however old");
    assert_eq!(found(stores, app, &theirs).await, 9_980);

    // Somebody new is let in, at the cost of the heaviest.
    let newcomers = keep_all(stores, app, (2000..2100).map(client)).await;
    assert_eq!(found(stores, app, &newcomers).await, 100);
    assert_eq!(found(stores, app, &honest).await, 20);
    assert_eq!(found(stores, app, &theirs).await, 9_880);
    for id in &newcomers {
        assert!(stores.use_flow(app, id, Binding::None).await.unwrap());
    }
    assert_eq!(kept(app).await.1, [9_900, 9_900, 360], "those that were used have left");

    // The heaviest makes room by its oldest: by the /48, where each /64 has as few as anybody.
    let mut site = Vec::new();
    for net in 0..300 {
        site.push(keep(stores, app, subnet(7, net)).await.unwrap());
    }
    assert_eq!(kept(app).await.1, [10_000, 10_000, 361]);
    assert_eq!(found(stores, app, &site[..150]).await, 0);
    assert_eq!(found(stores, app, &site[280..]).await, 20);
    assert_eq!(found(stores, app, &honest).await, 20);
}

#[tokio::test]
async fn a_client_address_begins_so_many_flows_and_is_told_when_to_come_again() {
    let fixture = Fixture::new().await;
    let Fixture { stores, app, .. } = &fixture;
    keep_all(stores, app, (0..MAX_OF_CLIENT).map(|_| client(7))).await;
    let refused = keep(stores, app, client(7)).await.unwrap_err();
    assert_eq!((refused.name, refused.window.count), ("unboundFlowsPerClient", MAX_OF_CLIENT));
    assert!(refused.retry_after <= Duration::from_secs(62), "{:?}", refused.retry_after);
    keep(stores, app, client(8)).await.unwrap();
    keep(stores, &an_app(), client(7)).await.expect("another App counts for itself");
}

#[tokio::test]
async fn flows_that_were_used_or_have_ended_count_no_more() {
    let fixture = Fixture::new().await;
    let Fixture { stores, app, .. } = &fixture;
    let ids = keep_all(stores, app, [client(1), client(1), client(2)].into_iter()).await;
    assert_eq!(kept(app).await, (3 + 3 + 2, [3, 3, 2]), "three flows, three indexes, those of two clients");
    for id in &ids {
        assert_eq!(stores.find_flow(app, id).await.unwrap().as_deref(), Some("sealed"));
        assert!(stores.use_flow(app, id, Binding::None).await.unwrap());
        assert!(!stores.use_flow(app, id, Binding::None).await.unwrap(), "once");
    }
    assert_eq!(kept(app).await, (0, [0, 0, 0]));

    let ended = keep_all(stores, app, (0..60).map(client)).await;
    let later = fixture.later(time::Duration::seconds(601)).await;
    keep(&later, app, client(100)).await.unwrap();
    assert_eq!(kept(app).await.1, [1, 1, 1]);
    assert_eq!(found(&later, app, &ended).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_who_use_a_flow_at_once_one_gets_it() {
    let fixture = Fixture::new().await;
    let another = fixture.another().await;
    for _ in 0..20 {
        let id = keep(&fixture.stores, &fixture.app, client(rand::random_range(0..60_000))).await.unwrap();
        let (one, other) = tokio::join!(
            fixture.stores.use_flow(&fixture.app, &id, Binding::None),
            another.use_flow(&fixture.app, &id, Binding::None)
        );
        assert!(one.unwrap() != other.unwrap());
    }
    assert_eq!(kept(&fixture.app).await, (0, [0, 0, 0]));
}
