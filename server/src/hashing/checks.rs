//! The checks of a login in an App with foreign hashes. Every login of the App does the same work, in the same order,
//! so that the response time shows neither whether the account exists nor which kind of hash it has (specification:
//! Accounts, Equal work).

use std::collections::BTreeSet;

use aws_lc_rs::rand::{SecureRandom, SystemRandom};

use super::{
    engine::{Argon2Engine, MEMORY_BYTES},
    queue::JobKind,
};
use crate::domain::{
    foreign_hash::{FirebaseScrypt, HashClass, ParsedHash},
    password::Password,
};

/// Jobs with a greater weight (CPU time, in native hashes) are heavy. Heavy jobs together use at most half of the
/// threads.
const HEAVY_WEIGHT: f64 = 2.0;

/// Checks of one password, which run one after the other in one job.
pub(super) struct Checks {
    password: Password,
    checks: Vec<Check>,
    firebase: Option<FirebaseScrypt>,
}

struct Check {
    hash: ParsedHash,
    /// Whether this is the user's own hash. The results of the other checks are ignored.
    is_own: bool,
}

/// Makes hashes that no password matches, one for each class.
pub(super) struct DummyHashes {
    salt: [u8; 16],
    output: [u8; 32],
}

// === impl DummyHashes ===

impl DummyHashes {
    pub(super) fn new() -> Self {
        let (mut salt, mut output) = ([0; 16], [0; 32]);
        let random = SystemRandom::new();
        let filled = random.fill(&mut salt).and_then(|()| random.fill(&mut output));
        filled.expect("the system's random number generator works");
        Self { salt, output }
    }

    fn of_class(&self, class: HashClass) -> ParsedHash {
        class.hash(&self.salt, &self.output)
    }
}

// === impl Checks ===

impl Checks {
    /// The checks of a login: one native check, and one for each class in the order of the classes. The check of the
    /// user's own hash replaces the check of its class. If the hash has a class that is not in `classes`, its check is
    /// added.
    pub(super) fn of_login(
        password: Password,
        own: Option<ParsedHash>,
        classes: &[HashClass],
        dummies: &DummyHashes,
        firebase: Option<FirebaseScrypt>,
    ) -> Self {
        let foreign: BTreeSet<HashClass> = classes
            .iter()
            .copied()
            .chain(own.as_ref().and_then(ParsedHash::foreign_class))
            .filter(|class| !class.is_native())
            .collect();
        let checks = std::iter::once(HashClass::NATIVE).chain(foreign).map(|class| match &own {
            Some(own) if own.class() == class => Check { hash: own.clone(), is_own: true },
            Some(_) | None => Check { hash: dummies.of_class(class), is_own: false },
        });
        Self { password, checks: checks.collect(), firebase }
    }

    /// The check of one hash, for a user who is logged in.
    pub(super) fn of_hash(password: Password, own: ParsedHash, firebase: Option<FirebaseScrypt>) -> Self {
        Self { password, checks: vec![Check { hash: own, is_own: true }], firebase }
    }

    /// Returns the CPU time of all checks, as a multiple of the time of a native hash.
    pub(super) fn weight(&self) -> f64 {
        self.checks.iter().map(|check| check.hash.class().weight()).sum()
    }

    pub(super) fn kind(&self) -> JobKind {
        let is_large = |check: &Check| check.hash.class().memory_bytes() > MEMORY_BYTES as u64;
        JobKind { is_heavy: self.weight() > HEAVY_WEIGHT, is_large: self.checks.iter().any(is_large) }
    }

    /// Runs all checks, whatever their results. Returns whether the password matches the user's hash.
    pub(super) fn run(&self, engine: &mut Argon2Engine) -> bool {
        let mut is_match = false;
        for Check { hash, is_own } in &self.checks {
            is_match |= engine.verify_parsed(&self.password, hash, self.firebase.as_ref()) & is_own;
        }
        is_match
    }
}

#[cfg(test)]
mod tests {
    use argon2_simd::Kernel;

    use super::*;
    use crate::domain::password::PasswordHash;

    const CLASSES: [&str; 2] = ["pbkdf2-sha256$i=1000,b=1", "bcrypt$4"];

    fn classes() -> [HashClass; 2] {
        CLASSES.map(|class| class.parse().unwrap())
    }

    fn checks(own: Option<&str>) -> Checks {
        let own = own.map(|text| ParsedHash::parse(text).unwrap());
        Checks::of_login(Password::new("x"), own, &classes(), &DummyHashes::new(), None)
    }

    fn order(checks: &Checks) -> Vec<(String, bool)> {
        checks.checks.iter().map(|check| (check.hash.class().to_string(), check.is_own)).collect()
    }

    fn expected(own: Option<usize>) -> Vec<(String, bool)> {
        let classes = ["argon2id$v=19$m=19456,t=2,p=1", "bcrypt$4", "pbkdf2-sha256$i=1000,b=1"];
        classes.into_iter().enumerate().map(|(index, class)| (class.to_owned(), Some(index) == own)).collect()
    }

    #[test]
    fn every_login_runs_the_same_checks_in_the_same_order() {
        let native = Argon2Engine::new(Kernel::fastest()).hash(&Password::new("x"), &[7; 16]);
        let bcrypt = "$2a$04$DCq7YPn5Rq63x1Lad4cll.TV4S6ytwfsfvkgY8jIucDrjc8deX1s.";
        let pbkdf2 = "$pbkdf2-sha256$i=1000,l=32$c2FsdA$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
        assert_eq!(order(&checks(None)), expected(None), "an unknown address, a user without a password");
        assert_eq!(order(&checks(Some(native.expose()))), expected(Some(0)));
        assert_eq!(order(&checks(Some(bcrypt))), expected(Some(1)));
        assert_eq!(order(&checks(Some(pbkdf2))), expected(Some(2)));
        let weight = checks(None).weight();
        for own in [native.expose(), bcrypt, pbkdf2] {
            assert!((checks(Some(own)).weight() - weight).abs() < f64::EPSILON);
        }
    }

    #[test]
    fn a_hash_of_a_class_that_the_app_does_not_list_is_checked_too() {
        let own = "$pbkdf2-sha1$i=1,l=20$c2FsdA$DGDID5YfDnHzqbUkr2ASBi/gN6Y";
        let own = ParsedHash::parse(own).unwrap();
        let checks = Checks::of_login(Password::new("password"), Some(own), &[], &DummyHashes::new(), None);
        assert!(checks.run(&mut Argon2Engine::new(Kernel::fastest())));
        assert_eq!(checks.checks.len(), 2);
    }

    #[test]
    fn only_the_users_own_hash_can_match() {
        let mut engine = Argon2Engine::new(Kernel::fastest());
        let native = engine.hash(&Password::new("x"), &[7; 16]);
        assert!(checks(Some(native.expose())).run(&mut engine));
        assert!(!checks(None).run(&mut engine));
        let mut others = checks(Some(native.expose()));
        others.checks[0].is_own = false;
        assert!(!others.run(&mut engine), "only another hash matches");
        let empty = PasswordHash::new("$none$");
        assert!(empty.parse().is_none());
    }

    #[test]
    fn the_kind_of_a_job_follows_from_weight_and_memory() {
        let kind = |class: &str| {
            let dummies = DummyHashes::new();
            Checks::of_login(Password::new("x"), None, &[class.parse().unwrap()], &dummies, None).kind()
        };
        let [light, heavy, large] =
            [(false, false), (true, false), (false, true)].map(|(is_heavy, is_large)| JobKind { is_heavy, is_large });
        assert_eq!(kind("bcrypt$8"), light, "weight 2");
        assert_eq!(kind("bcrypt$9"), heavy);
        assert_eq!(kind("scrypt$ln=14,r=8,p=1"), heavy, "16 MiB");
        assert_eq!(kind("argon2id$v=19$m=32768,t=1,p=1"), large);
        assert_eq!(kind("argon2id$v=19$m=65536,t=3,p=4"), JobKind { is_heavy: true, is_large: true });
    }
}
