//! Limits: exact at their bound, nothing taken where one refuses, and true about when to come back.

use std::time::Duration;

use latchkey_crds::rendered::{LimitName, Window};
use latchkey_server::{
    domain::{
        client::ClientAddress,
        limits::{Check, Limited},
        ports::{Limits, TakeError, Taken},
    },
    store::Stores,
};
use latchkey_tests::redis::Redis;
use tokio::task::JoinSet;

use super::{Fixture, an_app, an_email};

fn a_check(subject: &str, windows: &[(u32, u32)]) -> Check {
    let windows =
        windows.iter().map(|(count, window_seconds)| Window { count: *count, window_seconds: *window_seconds });
    Check { limit: LimitName::LoginsPerClient, subject: subject.to_owned(), windows: windows.collect() }
}

async fn take(stores: &Stores, fixture: &Fixture, checks: &[Check]) -> Result<Taken, Limited> {
    match stores.take(&fixture.app, checks.to_vec()).await {
        Ok(taken) => Ok(taken),
        Err(TakeError::Limited(limited)) => Err(limited),
        Err(TakeError::Store(error)) => panic!("{error}"),
    }
}

#[tokio::test]
async fn a_limit_holds_at_its_bound_and_says_which_window() {
    let fixture = Fixture::new().await;
    let check = [a_check("192.0.2.1", &[(3, 600)])];
    for _ in 0..3 {
        take(&fixture.stores, &fixture, &check).await.unwrap();
    }
    let limited = take(&fixture.stores, &fixture, &check).await.unwrap_err();
    assert_eq!((limited.limit, limited.window), (LimitName::LoginsPerClient, check[0].windows[0]));
    assert!(limited.retry_after > Duration::from_secs(590) && limited.retry_after <= Duration::from_secs(612));
    take(&fixture.stores, &fixture, &[a_check("192.0.2.2", &[(3, 600)])]).await.unwrap();
    let elsewhere = fixture.stores.take(&an_app(), check.to_vec()).await;
    assert!(elsewhere.is_ok(), "another App counts for itself");
}

#[tokio::test]
async fn all_servers_count_together_also_at_once() {
    let fixture = Fixture::new().await;
    let another = fixture.another().await;
    let mut tasks = JoinSet::new();
    for number in 0..60 {
        let stores = if number % 2 == 0 { fixture.stores.clone() } else { another.clone() };
        let app = fixture.app.clone();
        tasks.spawn(async move { stores.take(&app, vec![a_check("192.0.2.1", &[(25, 3600)])]).await.is_ok() });
    }
    assert_eq!(tasks.join_all().await.into_iter().filter(|taken| *taken).count(), 25);
}

#[tokio::test]
async fn what_is_given_back_can_be_taken_again() {
    let fixture = Fixture::new().await;
    let check = [a_check("192.0.2.1", &[(1, 60), (2, 3600)])];
    for _ in 0..5 {
        let taken = take(&fixture.stores, &fixture, &check).await.unwrap();
        take(&fixture.stores, &fixture, &check).await.unwrap_err();
        fixture.stores.give_back(&fixture.app, taken).await;
    }
    // Given back long after, it is not given twice.
    let taken = take(&fixture.stores, &fixture, &check).await.unwrap();
    fixture.stores.give_back(&fixture.app, taken.clone()).await;
    fixture.stores.give_back(&fixture.app, taken).await;
    take(&fixture.stores, &fixture, &check).await.unwrap();
    take(&fixture.stores, &fixture, &check).await.unwrap_err();
}

#[tokio::test]
async fn one_check_that_refuses_takes_nothing_of_the_others() {
    let fixture = Fixture::new().await;
    let (wide, narrow) = (a_check("wide", &[(2, 600)]), a_check("narrow", &[(1, 600)]));
    take(&fixture.stores, &fixture, &[wide.clone(), narrow.clone()]).await.unwrap();
    for _ in 0..5 {
        let limited = take(&fixture.stores, &fixture, &[wide.clone(), narrow.clone()]).await.unwrap_err();
        assert_eq!(limited.window, narrow.windows[0]);
    }
    take(&fixture.stores, &fixture, std::slice::from_ref(&wide)).await.unwrap();
    take(&fixture.stores, &fixture, &[wide]).await.unwrap_err();
}

#[tokio::test]
async fn one_window_that_refuses_takes_nothing_of_the_others() {
    let fixture = Fixture::new().await;
    let check = [a_check("ada", &[(1, 60), (8, 3600)])];
    take(&fixture.stores, &fixture, &check).await.unwrap();
    for _ in 0..20 {
        take(&fixture.stores, &fixture, &check).await.unwrap_err();
    }
    // The hour still has seven.
    for number in 1..8 {
        let later = fixture.later(time::Duration::seconds(62 * number)).await;
        take(&later, &fixture, &check).await.unwrap();
    }
    let later = fixture.later(time::Duration::seconds(62 * 8)).await;
    let limited = take(&later, &fixture, &check).await.unwrap_err();
    assert_eq!(limited.window.window_seconds, 3600);
}

#[tokio::test]
async fn whoever_comes_back_when_told_is_let_through_and_not_before() {
    let fixture = Fixture::new().await;
    for (count, seconds) in [(1, 60), (5, 60), (10, 900), (60, 60)] {
        let check = [a_check(&format!("{count} in {seconds}"), &[(count, seconds)])];
        // Spread over the first half of the window.
        for number in 0..count {
            let at = time::Duration::milliseconds(i64::from(seconds) * 500 * i64::from(number) / i64::from(count));
            take(&fixture.later(at).await, &fixture, &check).await.unwrap();
        }
        let half = time::Duration::seconds(i64::from(seconds) / 2);
        let limited = take(&fixture.later(half).await, &fixture, &check).await.unwrap_err();
        let wait = time::Duration::try_from(limited.retry_after).unwrap();
        // The clock goes on while this runs, so a moment before is two seconds before.
        let early = half + wait - time::Duration::seconds(2);
        take(&fixture.later(early).await, &fixture, &check).await.unwrap_err();
        take(&fixture.later(half + wait).await, &fixture, &check).await.unwrap();
        // A window passes and a fiftieth: never is it more than the limit says, seldom less.
        assert!(half + wait >= time::Duration::seconds(seconds.into()) - time::Duration::seconds(1));
        assert!(half + wait <= time::Duration::seconds(seconds.into()) * 1.02 + time::Duration::seconds(1));
    }
}

#[tokio::test]
async fn a_clock_that_goes_back_keeps_nobody_out() {
    let fixture = Fixture::new().await;
    let check = [a_check("192.0.2.1", &[(2, 600)])];
    let month = fixture.later(time::Duration::days(30)).await;
    for stores in [&month, &fixture.stores] {
        take(stores, &fixture, &check).await.unwrap();
        take(stores, &fixture, &check).await.unwrap();
        let limited = take(stores, &fixture, &check).await.unwrap_err();
        assert!(limited.retry_after <= Duration::from_secs(612), "{limited:?}");
    }
}

#[tokio::test]
async fn keys_of_limits_hold_no_client_and_end() {
    let fixture = Fixture::new().await;
    take(&fixture.stores, &fixture, &[a_check("192.0.2.77", &[(1, 60)])]).await.unwrap();
    let account = an_email("ada@example.com").account(&fixture.app);
    let client = ClientAddress::of("192.0.2.77".parse().unwrap());
    fixture.stores.remember(&fixture.app, &account, client).await;
    let mut redis = Redis::shared().await.connect().await.unwrap();
    let keys: Vec<String> =
        redis::cmd("KEYS").arg(format!("lk:{{{}:*", fixture.app)).query_async(&mut redis).await.unwrap();
    assert_eq!(keys.len(), 2, "{keys:?}");
    for key in keys {
        assert!(!key.contains("192.0.2.77") && !key.contains(account.as_str()), "{key}");
        let lives: i64 = redis::cmd("TTL").arg(&key).query_async(&mut redis).await.unwrap();
        assert!(lives > 0, "{key} lives {lives} s");
    }
}

#[tokio::test]
async fn an_account_knows_the_client_address_it_was_told() {
    let fixture = Fixture::new().await;
    let (stores, app) = (&fixture.stores, &fixture.app);
    let account = an_email("ada@example.com").account(app);
    let other = an_email("eva@example.com").account(app);
    let client = |text: &str| ClientAddress::of(text.parse().unwrap());
    assert!(!stores.is_known(app, &account, client("2001:db8::1")).await.unwrap());
    stores.remember(app, &account, client("2001:db8::1")).await;
    assert!(stores.is_known(app, &account, client("2001:db8::2")).await.unwrap(), "the same /64");
    assert!(!stores.is_known(app, &account, client("2001:db8:0:1::1")).await.unwrap());
    assert!(!stores.is_known(app, &other, client("2001:db8::1")).await.unwrap());
    assert!(!stores.is_known(&an_app(), &account, client("2001:db8::1")).await.unwrap());
}
