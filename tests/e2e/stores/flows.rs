//! Flows that no browser holds: as many as may be, and no more.

use std::{net::Ipv4Addr, time::Duration};

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

use super::{Fixture, an_app};

/// Of one App (contract, 5).
const MOST: u32 = 10_000;
/// Of one client address in a minute (contract, 5).
const MOST_OF_ONE: u32 = 30;

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

#[tokio::test]
async fn an_app_has_ten_thousand_unbound_flows_and_no_more() {
    let fixture = Fixture::new().await;
    let Fixture { stores, app, .. } = &fixture;
    let kept: Vec<FlowId> = stream::iter(0..MOST)
        .map(|number| keep(stores, app, client(number / MOST_OF_ONE)))
        .buffer_unordered(64)
        .try_collect()
        .await
        .unwrap();
    let newcomer = client(MOST);
    // More often than one client address may begin a flow: a refusal consumes nothing.
    for _ in 0..=MOST_OF_ONE {
        let refused = keep(stores, app, newcomer).await.unwrap_err();
        assert_eq!((refused.name, refused.window.count), ("unboundFlowsPerApp", MOST));
        assert!(refused.retry_after <= Duration::from_secs(600), "{:?}", refused.retry_after);
    }
    keep(stores, &an_app(), newcomer).await.expect("another App counts for itself");

    // A flow that is used makes room for one.
    assert!(stores.use_flow(app, &kept[0], Binding::None).await.unwrap());
    assert!(!stores.use_flow(app, &kept[0], Binding::None).await.unwrap());
    let id = keep(stores, app, newcomer).await.unwrap();
    assert_eq!(stores.find_flow(app, &id).await.unwrap().as_deref(), Some("sealed"));
    keep(stores, app, newcomer).await.unwrap_err();

    // And so do ten minutes.
    let later = fixture.later(time::Duration::seconds(601)).await;
    keep(&later, app, newcomer).await.unwrap();
}
