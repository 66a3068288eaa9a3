//! Rate limits: they are exact, no limit counts a rejected call, and the time until a retry is right.

use std::time::Duration;

use latchkey_crds::rendered::{LimitName, Window};
use latchkey_server::{
    domain::{
        client::ClientAddress,
        ports::{AcquireError, RateLimitPermit, RateLimits},
        rate_limits::{RateLimitCheck, RateLimited},
    },
    store::Stores,
};
use latchkey_tests::redis::Redis;
use tokio::task::JoinSet;

use super::{Fixture, an_app, an_email};

fn a_check(subject: &str, windows: &[(u32, u32)]) -> RateLimitCheck {
    let windows =
        windows.iter().map(|(count, window_seconds)| Window { count: *count, window_seconds: *window_seconds });
    RateLimitCheck { limit: LimitName::LoginsPerClient.into(), subject: subject.to_owned(), windows: windows.collect() }
}

async fn acquire(
    stores: &Stores,
    fixture: &Fixture,
    checks: &[RateLimitCheck],
) -> Result<RateLimitPermit, RateLimited> {
    match stores.acquire(&fixture.app, checks.to_vec()).await {
        Ok(permit) => Ok(permit),
        Err(AcquireError::RateLimited(limited)) => Err(limited),
        Err(AcquireError::Store(error)) => panic!("{error}"),
    }
}

#[tokio::test]
async fn a_limit_is_exact_and_its_refusal_names_the_window() {
    let fixture = Fixture::new().await;
    let check = [a_check("192.0.2.1", &[(3, 600)])];
    for _ in 0..3 {
        acquire(&fixture.stores, &fixture, &check).await.unwrap();
    }
    let limited = acquire(&fixture.stores, &fixture, &check).await.unwrap_err();
    assert_eq!((limited.limit.as_str(), limited.window), ("loginsPerClient", check[0].windows[0]));
    assert!(limited.retry_after > Duration::from_secs(590) && limited.retry_after <= Duration::from_secs(612));
    acquire(&fixture.stores, &fixture, &[a_check("192.0.2.2", &[(3, 600)])]).await.unwrap();
    let in_other_app = fixture.stores.acquire(&an_app(), check.to_vec()).await;
    assert!(in_other_app.is_ok(), "another App has its own count");
}

#[tokio::test]
async fn checking_a_limit_does_not_count_as_a_use() {
    let fixture = Fixture::new().await;
    let check = [a_check("192.0.2.1", &[(2, 60), (3, 600)])];
    for _ in 0..2 {
        for _ in 0..5 {
            fixture.stores.check_limits(&fixture.app, check.to_vec()).await.unwrap();
        }
        acquire(&fixture.stores, &fixture, &check).await.unwrap();
    }
    match fixture.stores.check_limits(&fixture.app, check.to_vec()).await {
        Err(AcquireError::RateLimited(limited)) => assert_eq!(limited.window, check[0].windows[0]),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn all_servers_share_one_count_even_concurrently() {
    let fixture = Fixture::new().await;
    let another = fixture.another_server().await;
    let mut tasks = JoinSet::new();
    for number in 0..60 {
        let stores = if number % 2 == 0 { fixture.stores.clone() } else { another.clone() };
        let app = fixture.app.clone();
        tasks.spawn(async move { stores.acquire(&app, vec![a_check("192.0.2.1", &[(25, 3600)])]).await.is_ok() });
    }
    assert_eq!(tasks.join_all().await.into_iter().filter(|permit| *permit).count(), 25);
}

#[tokio::test]
async fn a_released_permit_can_be_acquired_again() {
    let fixture = Fixture::new().await;
    let check = [a_check("192.0.2.1", &[(1, 60), (2, 3600)])];
    for _ in 0..5 {
        let permit = acquire(&fixture.stores, &fixture, &check).await.unwrap();
        acquire(&fixture.stores, &fixture, &check).await.unwrap_err();
        fixture.stores.release(&fixture.app, permit).await;
    }
    // A second release of the same permit has no effect.
    let permit = acquire(&fixture.stores, &fixture, &check).await.unwrap();
    fixture.stores.release(&fixture.app, permit.clone()).await;
    fixture.stores.release(&fixture.app, permit).await;
    acquire(&fixture.stores, &fixture, &check).await.unwrap();
    acquire(&fixture.stores, &fixture, &check).await.unwrap_err();
}

#[tokio::test]
async fn a_refusing_check_consumes_nothing_of_other_checks() {
    let fixture = Fixture::new().await;
    let (wide, narrow) = (a_check("wide", &[(2, 600)]), a_check("narrow", &[(1, 600)]));
    acquire(&fixture.stores, &fixture, &[wide.clone(), narrow.clone()]).await.unwrap();
    for _ in 0..5 {
        let limited = acquire(&fixture.stores, &fixture, &[wide.clone(), narrow.clone()]).await.unwrap_err();
        assert_eq!(limited.window, narrow.windows[0]);
    }
    acquire(&fixture.stores, &fixture, std::slice::from_ref(&wide)).await.unwrap();
    acquire(&fixture.stores, &fixture, &[wide]).await.unwrap_err();
}

#[tokio::test]
async fn a_refusing_window_consumes_nothing_of_other_windows() {
    let fixture = Fixture::new().await;
    let check = [a_check("ada", &[(1, 60), (8, 3600)])];
    acquire(&fixture.stores, &fixture, &check).await.unwrap();
    for _ in 0..20 {
        acquire(&fixture.stores, &fixture, &check).await.unwrap_err();
    }
    // The window of an hour still allows seven calls.
    for number in 1..8 {
        let later = fixture.with_later_clock(time::Duration::seconds(62 * number)).await;
        acquire(&later, &fixture, &check).await.unwrap();
    }
    let later = fixture.with_later_clock(time::Duration::seconds(62 * 8)).await;
    let limited = acquire(&later, &fixture, &check).await.unwrap_err();
    assert_eq!(limited.window.window_seconds, 3600);
}

#[tokio::test]
async fn a_retry_succeeds_after_the_retry_time_and_not_before() {
    let fixture = Fixture::new().await;
    for (count, seconds) in [(1, 60), (5, 60), (10, 900), (60, 60)] {
        let check = [a_check(&format!("{count} in {seconds}"), &[(count, seconds)])];
        // Spreads the calls over the first half of the window.
        for number in 0..count {
            let offset = time::Duration::milliseconds(i64::from(seconds) * 500 * i64::from(number) / i64::from(count));
            acquire(&fixture.with_later_clock(offset).await, &fixture, &check).await.unwrap();
        }
        let half = time::Duration::seconds(i64::from(seconds) / 2);
        let limited = acquire(&fixture.with_later_clock(half).await, &fixture, &check).await.unwrap_err();
        let wait = time::Duration::try_from(limited.retry_after).unwrap();
        // Two seconds before the end of the wait, because the real clock advances during the test.
        let too_early = half + wait - time::Duration::seconds(2);
        acquire(&fixture.with_later_clock(too_early).await, &fixture, &check).await.unwrap_err();
        acquire(&fixture.with_later_clock(half + wait).await, &fixture, &check).await.unwrap();
        // Calls are counted per fiftieth of a window, so the wait can be too long by up to a fiftieth of the window. A
        // limit never allows more calls than its count, and seldom fewer.
        assert!(half + wait >= time::Duration::seconds(seconds.into()) - time::Duration::seconds(1));
        assert!(half + wait <= time::Duration::seconds(seconds.into()) * 1.02 + time::Duration::seconds(1));
    }
}

#[tokio::test]
async fn a_clock_that_goes_back_blocks_no_client() {
    let fixture = Fixture::new().await;
    let check = [a_check("192.0.2.1", &[(2, 600)])];
    let a_month_ahead = fixture.with_later_clock(time::Duration::days(30)).await;
    for stores in [&a_month_ahead, &fixture.stores] {
        acquire(stores, &fixture, &check).await.unwrap();
        acquire(stores, &fixture, &check).await.unwrap();
        let limited = acquire(stores, &fixture, &check).await.unwrap_err();
        assert!(limited.retry_after <= Duration::from_secs(612), "{limited:?}");
    }
}

#[tokio::test]
async fn limit_keys_contain_no_client_address_and_expire() {
    let fixture = Fixture::new().await;
    acquire(&fixture.stores, &fixture, &[a_check("192.0.2.77", &[(1, 60)])]).await.unwrap();
    let account = an_email("ada@example.com").account_key(&fixture.app);
    let client = ClientAddress::from_ip("192.0.2.77".parse().unwrap());
    fixture.stores.remember_client(&fixture.app, &account, client).await;
    let mut redis = Redis::shared().await.connect().await.unwrap();
    let keys: Vec<String> =
        redis::cmd("KEYS").arg(format!("lk:{{{}:*", fixture.app)).query_async(&mut redis).await.unwrap();
    assert_eq!(keys.len(), 2, "{keys:?}");
    for key in keys {
        assert!(!key.contains("192.0.2.77") && !key.contains(account.as_str()), "{key}");
        let ttl: i64 = redis::cmd("TTL").arg(&key).query_async(&mut redis).await.unwrap();
        assert!(ttl > 0, "{key} has a TTL of {ttl} s");
    }
}

#[tokio::test]
async fn an_account_knows_a_remembered_client_address() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let account = an_email("ada@example.com").account_key(app);
    let other = an_email("eva@example.com").account_key(app);
    let client = |text: &str| ClientAddress::from_ip(text.parse().unwrap());
    assert!(!stores.is_known_client(app, &account, client("2001:db8::1")).await.unwrap());
    stores.remember_client(app, &account, client("2001:db8::1")).await;
    assert!(stores.is_known_client(app, &account, client("2001:db8::2")).await.unwrap(), "the same /64");
    assert!(!stores.is_known_client(app, &account, client("2001:db8:0:1::1")).await.unwrap());
    assert!(!stores.is_known_client(app, &other, client("2001:db8::1")).await.unwrap());
    assert!(!stores.is_known_client(&an_app(), &account, client("2001:db8::1")).await.unwrap());
}
