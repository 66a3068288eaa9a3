//! The limit on social login flows that are stored in Redis instead of in the browser (*unbound* flows).

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
        flow::{FLOW_SECONDS, FlowBinding, FlowId, FlowState, TooManyFlows},
        ports::{Flows, StoreFlowError},
    },
    store::Stores,
};
use latchkey_tests::redis::Redis as RedisServer;

use super::{Fixture, an_app};

/// Maximum number of unbound flows per client address and minute (specification: Social login, Redirect).
const MAX_PER_CLIENT: u32 = 30;

fn a_flow_id() -> FlowId {
    FlowState::generate(&Env::system()).id()
}

/// An IPv4 client address. Each number gives a different address.
fn client(number: u32) -> ClientAddress {
    ClientAddress::from_ip(Ipv4Addr::from_bits(Ipv4Addr::new(198, 18, 0, 0).to_bits() + number).into())
}

async fn store_flow(stores: &Stores, app: &AppId, from: ClientAddress) -> Result<FlowId, TooManyFlows> {
    let id = a_flow_id();
    match stores.store_flow(app, &id, "sealed", from, FLOW_SECONDS).await {
        Ok(()) => Ok(id),
        Err(StoreFlowError::TooManyFlows(too_many)) => Err(too_many),
        Err(StoreFlowError::Store(error)) => panic!("{error}"),
    }
}

/// An IPv6 client address in the /64 `net` of the /48 `site`.
fn ipv6_client(site: u16, net: u16) -> ClientAddress {
    ClientAddress::from_ip(Ipv6Addr::new(0x2001, 0xdb8, site, net, 0, 0, 0, 1).into())
}

async fn store_flows(stores: &Stores, app: &AppId, from: impl Iterator<Item = ClientAddress>) -> Vec<FlowId> {
    let flows = stream::iter(from).map(|client| store_flow(stores, app, client)).buffer_unordered(64);
    flows.try_collect().await.expect("no flow is refused")
}

async fn count_found(stores: &Stores, app: &AppId, ids: &[FlowId]) -> usize {
    let found = stream::iter(ids).map(|id| stores.find_flow(app, id)).buffer_unordered(64);
    let found: Vec<_> = found.try_collect().await.unwrap();
    found.into_iter().flatten().count()
}

/// The number of the App's flow keys in Redis, and the sizes of the three indexes. Asserts that all keys expire.
async fn stored_sizes(app: &AppId) -> (usize, [usize; 3]) {
    let mut redis = RedisServer::shared().await.connect().await.unwrap();
    let keys: Vec<String> =
        redis::cmd("KEYS").arg(format!("lk:{{{app}:flows}}:*")).query_async(&mut redis).await.unwrap();
    for key in &keys {
        let ttl_millis: i64 = redis::cmd("PTTL").arg(key).query_async(&mut redis).await.unwrap();
        assert!((1..=600_000).contains(&ttl_millis), "{key} expires in {ttl_millis} ms");
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
async fn clients_that_fill_the_flow_limit_displace_only_their_own_flows() {
    let fixture = Fixture::new().await;
    let Fixture { stores, app, .. } = &fixture;
    let honest_flows = store_flows(stores, app, (1000..1020).map(client)).await;
    // At 30 flows per minute, 34 client addresses can start 10,200 flows in ten minutes. So that the test need not
    // wait, 340 addresses start them in one minute.
    let attackers = (0..340).flat_map(|number| (0..MAX_PER_CLIENT).map(move |_| client(number)));
    let attacker_flows = store_flows(stores, app, attackers).await;
    assert_eq!(attacker_flows.len(), 10_200);
    assert_eq!(
        stored_sizes(app).await.1,
        [10_000, 10_000, 360],
        "the maximum number of flows, from 340 and 20 clients"
    );
    assert_eq!(
        count_found(stores, app, &honest_flows).await,
        20,
        "a client with few flows keeps them, however old they are"
    );
    assert_eq!(count_found(stores, app, &attacker_flows).await, 9_980);

    // New clients can start flows. The clients with the most flows lose some.
    let new_flows = store_flows(stores, app, (2000..2100).map(client)).await;
    assert_eq!(count_found(stores, app, &new_flows).await, 100);
    assert_eq!(count_found(stores, app, &honest_flows).await, 20);
    assert_eq!(count_found(stores, app, &attacker_flows).await, 9_880);
    for id in &new_flows {
        assert!(stores.consume_flow(app, id, FlowBinding::Unbound).await.unwrap());
    }
    assert_eq!(stored_sizes(app).await.1, [9_900, 9_900, 360], "used flows are no longer counted");

    // The client with the most flows loses its oldest flows. All flows of an IPv6 /48 count as those of one client,
    // although each /64 has few flows.
    let mut site_flows = Vec::new();
    for net in 0..300 {
        site_flows.push(store_flow(stores, app, ipv6_client(7, net)).await.unwrap());
    }
    assert_eq!(stored_sizes(app).await.1, [10_000, 10_000, 361]);
    assert_eq!(count_found(stores, app, &site_flows[..150]).await, 0);
    assert_eq!(count_found(stores, app, &site_flows[280..]).await, 20);
    assert_eq!(count_found(stores, app, &honest_flows).await, 20);
}

#[tokio::test]
async fn flows_per_client_address_are_limited_with_a_retry_time() {
    let fixture = Fixture::new().await;
    let Fixture { stores, app, .. } = &fixture;
    store_flows(stores, app, (0..MAX_PER_CLIENT).map(|_| client(7))).await;
    let refused = store_flow(stores, app, client(7)).await.unwrap_err();
    assert_eq!((refused.name, refused.window.count), ("unboundFlowsPerClient", MAX_PER_CLIENT));
    assert!(refused.retry_after <= Duration::from_secs(62), "{:?}", refused.retry_after);
    store_flow(stores, app, client(8)).await.unwrap();
    store_flow(stores, &an_app(), client(7)).await.expect("another App has its own count");
}

#[tokio::test]
async fn used_and_expired_flows_are_not_counted() {
    let fixture = Fixture::new().await;
    let Fixture { stores, app, .. } = &fixture;
    let ids = store_flows(stores, app, [client(1), client(1), client(2)].into_iter()).await;
    assert_eq!(stored_sizes(app).await, (3 + 3 + 2, [3, 3, 2]), "three flows, three indexes, the keys of two clients");
    for id in &ids {
        assert_eq!(stores.find_flow(app, id).await.unwrap().as_deref(), Some("sealed"));
        assert!(stores.consume_flow(app, id, FlowBinding::Unbound).await.unwrap());
        assert!(!stores.consume_flow(app, id, FlowBinding::Unbound).await.unwrap(), "once");
    }
    assert_eq!(stored_sizes(app).await, (0, [0, 0, 0]));

    let expired = store_flows(stores, app, (0..60).map(client)).await;
    let later = fixture.with_later_clock(time::Duration::seconds(601)).await;
    store_flow(&later, app, client(100)).await.unwrap();
    assert_eq!(stored_sizes(app).await.1, [1, 1, 1]);
    assert_eq!(count_found(&later, app, &expired).await, 0);
}

/// A `tx` (the sealed target of a login) that is too long for the cookie is stored like a flow. The `tx` of a
/// registration is stored for an hour, a flow of a social login for ten minutes.
#[tokio::test]
async fn the_indexes_of_flows_do_not_expire_before_the_flow_with_the_longest_lifetime() {
    let fixture = Fixture::new().await;
    let Fixture { stores, app, .. } = &fixture;
    let long = a_flow_id();
    assert!(stores.store_flow(app, &long, "sealed", client(1), 3_600).await.is_ok());
    store_flows(stores, app, [client(1), client(2)].into_iter()).await;
    let mut redis = RedisServer::shared().await.connect().await.unwrap();
    for index in ["alive", "clients", "counts"] {
        let key = format!("lk:{{{app}:flows}}:{index}");
        let ttl: i64 = redis::cmd("PTTL").arg(key).query_async(&mut redis).await.unwrap();
        assert!(ttl > 3_590_000, "{index} expires in {ttl} ms, before its longest flow");
    }
    assert_eq!(stores.find_flow(app, &long).await.unwrap().as_deref(), Some("sealed"));
    assert!(stores.consume_flow(app, &long, FlowBinding::Unbound).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_one_of_two_concurrent_uses_gets_a_flow() {
    let fixture = Fixture::new().await;
    let another = fixture.another_server().await;
    for _ in 0..20 {
        let id = store_flow(&fixture.stores, &fixture.app, client(rand::random_range(0..60_000))).await.unwrap();
        let (one, other) = tokio::join!(
            fixture.stores.consume_flow(&fixture.app, &id, FlowBinding::Unbound),
            another.consume_flow(&fixture.app, &id, FlowBinding::Unbound)
        );
        assert!(one.unwrap() != other.unwrap());
    }
    assert_eq!(stored_sizes(&fixture.app).await, (0, [0, 0, 0]));
}
