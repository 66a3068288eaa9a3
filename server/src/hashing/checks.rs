//! The checks of a login in an App with foreign hashes. Every login of the App does the same work, in the same order,
//! so that the response time shows neither whether the account exists nor which kind of hash it has (specification:
//! Accounts, Equal work).

use std::collections::BTreeSet;

use aws_lc_rs::rand::{SecureRandom, SystemRandom};

use super::{engine::Argon2Engine, queue::JobKind};
use crate::domain::{
    foreign_hash::{FirebaseScrypt, HashClass, ParsedHash},
    password::Password,
};

/// A job is heavy if it needs more CPU time than this number of new hashes. Heavy jobs together use at most half of the
/// threads.
const HEAVY_HASHES: f64 = 2.0;

/// Checks of one password, which run one after the other in one job.
pub(super) struct Checks {
    password: Password,
    checks: Vec<Check>,
    /// The class (function and cost parameters) of new hashes.
    native: HashClass,
    firebase: Option<FirebaseScrypt>,
}

struct Check {
    hash: ParsedHash,
    /// Whether this is the user's own hash. The results of the other checks are ignored.
    is_own: bool,
}

/// Makes hashes that no password matches, one for each class (hash function and cost).
pub(super) struct DummyHashes {
    /// The class (function and cost parameters) of new hashes.
    native: HashClass,
    salt: [u8; 16],
    output: [u8; 32],
}

// === impl DummyHashes ===

impl DummyHashes {
    pub(super) fn new(native: HashClass) -> Self {
        let (mut salt, mut output) = ([0; 16], [0; 32]);
        let random = SystemRandom::new();
        let filled = random.fill(&mut salt).and_then(|()| random.fill(&mut output));
        filled.expect("the system's random number generator works");
        Self { native, salt, output }
    }

    fn of_class(&self, class: HashClass) -> ParsedHash {
        class.hash(&self.salt, &self.output)
    }
}

// === impl Checks ===

impl Checks {
    /// The checks of a login: first one with the parameters of new hashes, then one for each other class in `classes`,
    /// sorted by class. The check of the user's own hash replaces the check of its class. If the hash has a class that
    /// is not in `classes`, its check is added.
    pub(super) fn of_login(
        password: Password,
        own: Option<ParsedHash>,
        classes: &[HashClass],
        dummies: &DummyHashes,
        firebase: Option<FirebaseScrypt>,
    ) -> Self {
        let native = dummies.native;
        let foreign: BTreeSet<HashClass> = classes
            .iter()
            .copied()
            .chain(own.as_ref().map(ParsedHash::class))
            .filter(|class| *class != native)
            .collect();
        let checks = std::iter::once(native).chain(foreign).map(|class| match &own {
            Some(own) if own.class() == class => Check { hash: own.clone(), is_own: true },
            Some(_) | None => Check { hash: dummies.of_class(class), is_own: false },
        });
        Self { password, checks: checks.collect(), native, firebase }
    }

    /// The check of one hash, for a user who is logged in. `native` is the class of new hashes.
    pub(super) fn of_hash(
        password: Password,
        own: ParsedHash,
        native: HashClass,
        firebase: Option<FirebaseScrypt>,
    ) -> Self {
        Self { password, checks: vec![Check { hash: own, is_own: true }], native, firebase }
    }

    /// Returns the CPU time of all checks, as a multiple of the time of a hash with the default parameters.
    pub(super) fn weight(&self) -> f64 {
        self.checks.iter().map(|check| check.hash.class().weight()).sum()
    }

    pub(super) fn kind(&self) -> JobKind {
        let is_heavy = self.weight() > HEAVY_HASHES * self.native.weight();
        let is_large = |check: &Check| check.hash.class().memory_bytes() > self.native.memory_bytes();
        JobKind { is_heavy, is_large: self.checks.iter().any(is_large) }
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
    use crate::domain::{foreign_hash::Argon2Class, password::PasswordHash};

    const CLASSES: [&str; 2] = ["pbkdf2-sha256$i=1000,b=1", "bcrypt$4"];

    fn classes() -> [HashClass; 2] {
        CLASSES.map(|class| class.parse().unwrap())
    }

    fn dummies() -> DummyHashes {
        DummyHashes::new(HashClass::DEFAULT_NATIVE)
    }

    fn engine() -> Argon2Engine {
        Argon2Engine::new(Kernel::fastest(), Argon2Class::DEFAULT_NATIVE)
    }

    fn checks(own: Option<&str>) -> Checks {
        let own = own.map(|text| ParsedHash::parse(text).unwrap());
        Checks::of_login(Password::new("x"), own, &classes(), &dummies(), None)
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
        let native = engine().hash(&Password::new("x"), &[7; 16]);
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
        let checks = Checks::of_login(Password::new("password"), Some(own), &[], &dummies(), None);
        assert!(checks.run(&mut engine()));
        assert_eq!(checks.checks.len(), 2);
    }

    #[test]
    fn only_the_users_own_hash_can_match() {
        let mut engine = engine();
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
            Checks::of_login(Password::new("x"), None, &[class.parse().unwrap()], &dummies(), None).kind()
        };
        let [light, heavy, large] =
            [(false, false), (true, false), (false, true)].map(|(is_heavy, is_large)| JobKind { is_heavy, is_large });
        assert_eq!(kind("bcrypt$8"), light, "weight 2");
        assert_eq!(kind("bcrypt$9"), heavy);
        assert_eq!(kind("scrypt$ln=14,r=8,p=1"), heavy, "16 MiB");
        assert_eq!(kind("argon2id$v=19$m=32768,t=1,p=1"), large);
        assert_eq!(kind("argon2id$v=19$m=65536,t=3,p=4"), JobKind { is_heavy: true, is_large: true });
    }

    #[test]
    fn a_hash_with_earlier_parameters_adds_a_check_to_every_login() {
        let stronger = Argon2Class::native(20, 3).unwrap();
        let dummies = DummyHashes::new(HashClass::Argon2(stronger));
        let old = engine().hash(&Password::new("x"), &[7; 16]).parse().unwrap();
        let new = Argon2Engine::new(Kernel::fastest(), stronger).hash(&Password::new("x"), &[7; 16]).parse().unwrap();
        let classes = [HashClass::DEFAULT_NATIVE, HashClass::Argon2(stronger)];
        let names = ["argon2id$v=19$m=20480,t=3,p=1", "argon2id$v=19$m=19456,t=2,p=1"];
        for (own, place) in [(None, None), (Some(new), Some(0)), (Some(old), Some(1))] {
            let checks = Checks::of_login(Password::new("x"), own, &classes, &dummies, None);
            let expected = names.into_iter().enumerate().map(|(index, name)| (name.to_owned(), Some(index) == place));
            assert_eq!(order(&checks), expected.collect::<Vec<_>>());
            assert_eq!(checks.kind(), JobKind::default(), "it takes less time than two native hashes");
            assert_eq!(checks.run(&mut Argon2Engine::new(Kernel::fastest(), stronger)), place.is_some());
        }
        // The installation goes back to the default parameters.
        let checks = Checks::of_login(Password::new("x"), None, &classes, &self::dummies(), None);
        assert_eq!(checks.kind(), JobKind { is_heavy: true, is_large: true }, "weights 1 and 1.58, 20 MiB");
    }
}
