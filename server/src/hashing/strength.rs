//! Password strength by zxcvbn, at a bounded cost for every input (docs/decisions/0021).

use zxcvbn::{Entropy, zxcvbn};

use crate::domain::password::MAX_PASSWORD_CHARS;

/// The maximum length of a password, in characters, that zxcvbn scores in one call. The time grows with the square of
/// the length. For a keyboard pattern, zxcvbn also computes 4^turns, where turns is the number of changes of direction,
/// because a key has 4 neighbours on average. A pattern of 32 characters has at most 31 turns: 4^31 fits in 64 bits,
/// 4^32 does not.
const MAX_WHOLE_CHARS: usize = 32;
/// The maximum length, in characters, of the parts of a longer password. Parts are shorter than [`MAX_WHOLE_CHARS`],
/// because up to eight calls of zxcvbn are necessary to score them.
const MAX_PART_CHARS: usize = 20;
/// The maximum number of characters of a longer password that are scored. Further characters are ignored.
const MAX_SCORED_CHARS: usize = 48;
/// The longest run of keypad keys that is scored. A keypad key has 5 neighbours on average, and a run of 28 keys has at
/// most 27 changes of direction: 5^27 fits in 64 bits, 5^28 does not.
const MAX_KEYPAD_RUN: usize = 28;
/// The keys of the two keypads of zxcvbn.
const KEYPAD: &str = "0123456789*+-./=";
/// The maximum number of guess words. Further guess words are ignored. An ordinary email address and name give fewer
/// than 15.
const MAX_GUESSES: usize = 24;
/// The maximum number of interpretations of a part, and of a password of [`MAX_WHOLE_CHARS`] characters. An
/// interpretation is one way to replace the l33t symbols by letters. zxcvbn searches its dictionaries once per
/// interpretation, and the time of a search grows with the square of the length. So a password of half the length may
/// have four times as many interpretations. Digits have at most 8 interpretations.
const MAX_INTERPRETATIONS: usize = 8;
/// Minimum length, in characters, of the guess words and repetitions that are removed from a long password before it is
/// split.
const MIN_REMOVED_CHARS: usize = 8;
/// Maximum length, in characters, of a pattern that is left out of its part because the split may have broken it.
const MAX_BROKEN_CHARS: usize = 10;
/// The minimum number of an attacker's attempts for each score above 0, as in zxcvbn.
const SCORE_THRESHOLDS: [u64; 4] = [1_005, 1_000_005, 100_000_005, 10_000_000_005];

/// For each of the letters `a`, `b`, `c`, `e`, `g`, `o`, `s`, `x` and `z`: the symbols that zxcvbn reads as this
/// letter. `i`, `l` and `t` share symbols, which [`count_interpretations`] handles separately.
const LETTER_SYMBOLS: [&str; 9] = ["4@", "8", "({[<", "3", "69", "0", "$5", "%", "2"];
/// Symbols, each with a replacement of similar meaning, the rarest symbol first. The replacements are applied in this
/// order while a password has too many interpretations. Digits stay, because dates and sequences consist of them.
const REPLACEMENTS: [(char, char); 8] =
    [('<', '('), ('{', '('), ('[', '('), ('|', '!'), ('+', '7'), ('@', '4'), ('$', '5'), ('!', '1')];

/// The strength of a password, from 0 to 4, against an attacker who tries `guesses` first.
///
/// This is the score of zxcvbn if the password has at most [`MAX_WHOLE_CHARS`] characters and few interpretations of
/// l33t symbols, as ordinary passwords do. A longer password is scored in parts, until the parts scored so far are
/// strong: whoever guesses the whole password has guessed these parts, too.
pub fn score(password: &str, guesses: &[String]) -> u8 {
    let mut chars: Vec<char> = password.chars().take(MAX_PASSWORD_CHARS).collect();
    let mut guesses: Vec<String> = guesses.iter().take(MAX_GUESSES).cloned().collect();
    if chars.len() > MAX_WHOLE_CHARS {
        remove_guesses(&mut chars, &guesses);
        chars = without_repeats(chars);
    }
    for guess in &mut guesses {
        // zxcvbn cannot find a guess that is longer than the scored text. Such a guess is emptied rather than removed,
        // so that the other guesses keep their rank.
        if guess.chars().count() > MAX_WHOLE_CHARS {
            guess.clear();
        }
    }
    let attempts = if chars.len() <= MAX_WHOLE_CHARS {
        estimate(&chars, &guesses, MAX_WHOLE_CHARS).guesses()
    } else {
        estimate_in_parts(&chars, &guesses)
    };
    let reached = SCORE_THRESHOLDS.iter().filter(|least| attempts >= **least).count();
    u8::try_from(reached).unwrap_or(u8::MAX)
}

/// The number of attempts after which the first parts of a long password are guessed.
fn estimate_in_parts(chars: &[char], guesses: &[String]) -> u64 {
    let highest_threshold = SCORE_THRESHOLDS[SCORE_THRESHOLDS.len() - 1];
    let scored = &chars[..chars.len().min(MAX_SCORED_CHARS)];
    let (mut attempts, mut start): (u64, usize) = (1, 0);
    while start < scored.len() && attempts < highest_threshold {
        let part = &scored[start..scored.len().min(start + MAX_PART_CHARS)];
        let mut estimated = estimate(part, guesses, part.len());
        let is_last = start + part.len() == chars.len();
        // A pattern that the split may have broken is left out and scored with the next part, because half of a word
        // would look like random characters. If the pattern is long, it may continue beyond the next part; the rest of
        // the password is then not scored.
        let end = start_near_the_end(&estimated, part.len()).filter(|_| !is_last);
        if let Some(end) = end {
            estimated = estimate(&part[..end], guesses, end);
        }
        attempts = attempts.saturating_mul(estimated.guesses().max(1));
        match end {
            Some(end) if start + part.len() < scored.len() => start += end,
            _ => break,
        }
    }
    attempts
}

/// The estimate of zxcvbn for a text of at most `max_chars` characters, after its interpretations and keypad runs were
/// limited.
fn estimate(text: &[char], guesses: &[String], max_chars: usize) -> Entropy {
    let (mut text, mut guesses) = (text.to_vec(), guesses.to_vec());
    limit_interpretations(&mut text, &mut guesses, max_chars);
    limit_keypad_runs(&mut text);
    let guesses: Vec<&str> = guesses.iter().map(String::as_str).collect();
    zxcvbn(&text.iter().collect::<String>(), &guesses)
}

/// The start of the first pattern that begins in the last [`MAX_BROKEN_CHARS`] characters of a part of this length. The
/// split at the end of the part may have broken this pattern.
fn start_near_the_end(estimated: &Entropy, length: usize) -> Option<usize> {
    let mut starts = estimated.sequence().iter().map(|pattern| pattern.i);
    starts.find(|start| start + MAX_BROKEN_CHARS >= length)
}

/// Removes complete guess words, so that the split breaks none of them. Also finds guess words with other upper- and
/// lower-case letters, in l33t, and reversed.
fn remove_guesses(chars: &mut Vec<char>, guesses: &[String]) {
    for guess in guesses {
        let mut word: Vec<char> = guess.chars().map(fold_lookalikes).collect();
        if word.len() < MIN_REMOVED_CHARS {
            continue;
        }
        for _ in 0..2 {
            let mut at = 0;
            while at + word.len() <= chars.len() {
                let end = at + word.len();
                if chars[at..end].iter().copied().map(fold_lookalikes).eq(word.iter().copied()) {
                    chars.drain(at..end);
                } else {
                    at += 1;
                }
            }
            word.reverse();
        }
    }
}

/// Maps characters that look alike to one character, in lower case.
fn fold_lookalikes(char: char) -> char {
    match char {
        '4' | '@' => 'a',
        '8' => 'b',
        '(' | '{' | '[' | '<' => 'c',
        '3' => 'e',
        '6' | '9' => 'g',
        '1' | '!' | '|' | '7' | '+' | 'l' | 'L' | 't' | 'T' | 'I' => 'i',
        '0' => 'o',
        '$' | '5' => 's',
        '%' => 'x',
        '2' => 'z',
        other => other.to_lowercase().next().unwrap_or(other),
    }
}

/// Keeps only one copy of each text that is repeated directly after itself. Looks for the shortest repeated texts
/// first.
fn without_repeats(mut chars: Vec<char>) -> Vec<char> {
    let drop_copies = |kept: &mut Vec<char>, run: usize, period: usize| {
        if run >= period && run + period >= MIN_REMOVED_CHARS {
            let second_copy = kept.len() - run;
            kept.drain(second_copy..second_copy + run / period * period);
        }
    };
    let mut period = 1;
    while period * 2 <= chars.len() {
        let mut kept = Vec::with_capacity(chars.len());
        // The number of characters in a row, up to the current one, that are equal to the character one period before
        // them.
        let mut run = 0;
        for (at, char) in chars.iter().enumerate() {
            if at >= period && chars[at - period] == *char {
                run += 1;
            } else {
                drop_copies(&mut kept, run, period);
                run = 0;
            }
            kept.push(*char);
        }
        drop_copies(&mut kept, run, period);
        chars = kept;
        period += 1;
    }
    chars
}

/// Replaces symbols of a text of at most `max_chars` characters until zxcvbn can search all interpretations in bounded
/// time. Replaces the same symbols in the guess words, so that the guess words are still found.
fn limit_interpretations(chars: &mut [char], guesses: &mut [String], max_chars: usize) {
    let max_cost = MAX_INTERPRETATIONS * max_chars * max_chars;
    for (symbol, replacement) in REPLACEMENTS {
        if count_interpretations(chars) * chars.len() * chars.len() <= max_cost {
            break;
        }
        for char in chars.iter_mut().filter(|char| **char == symbol) {
            *char = replacement;
        }
        for guess in guesses.iter_mut().filter(|guess| guess.contains(symbol)) {
            *guess = guess.replace(symbol, replacement.encode_utf8(&mut [0; 4]));
        }
    }
}

/// The number of l33t searches of zxcvbn. For each letter, zxcvbn chooses one of the symbols in the password that can
/// stand for it. Each combination of these choices is one search.
fn count_interpretations(chars: &[char]) -> usize {
    let count = |symbols: &str| symbols.chars().filter(|symbol| chars.contains(symbol)).count();
    // `1` and `|` can stand for i and for l. If a combination uses one of them for both letters, zxcvbn tries each
    // letter. The same holds for `7`, which can stand for l and for t.
    let (i, l, t) = (count("1!|"), count("1|7"), count("+7"));
    let either = if i > 0 && l > 0 { count("1|") } else { 0 };
    let mut interpretations = (i.max(1) * l.max(1) + either) * t.max(1) + count("7") * i.max(1);
    for symbols in LETTER_SYMBOLS {
        interpretations *= count(symbols).max(1);
    }
    interpretations
}

/// Drops keypad keys beyond the longest run that can be scored.
fn limit_keypad_runs(chars: &mut Vec<char>) {
    let mut run = 0;
    chars.retain(|char| {
        run = if KEYPAD.contains(*char) { run + 1 } else { 0 };
        run <= MAX_KEYPAD_RUN
    });
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::{
        domain::{
            email::Email,
            foreign_hash::Argon2Class,
            password::{self, Password},
            user::Name,
        },
        hashing::engine::Argon2Engine,
    };

    /// Words from which people make passwords, including rare ones.
    const WORDS: [&str; 48] = [
        "correct",
        "horse",
        "battery",
        "staple",
        "summer",
        "winter",
        "dragon",
        "monkey",
        "princess",
        "football",
        "harbour",
        "quilt",
        "lantern",
        "marble",
        "thunder",
        "coffee",
        "guitar",
        "sunshine",
        "berlin",
        "london",
        "purple",
        "silver",
        "orange",
        "mountain",
        "river",
        "garden",
        "window",
        "kitchen",
        "pepper",
        "cookie",
        "shadow",
        "master",
        "welcome",
        "secret",
        "hello",
        "freedom",
        "whatever",
        "computer",
        "internet",
        "michelle",
        "jennifer",
        "charlie",
        "jordan",
        "aardvark",
        "zeppelin",
        "quokka",
        "xylophone",
        "bergamot",
    ];
    const SUFFIXES: [&str; 16] =
        ["", "1", "12", "123", "1234", "!", "1!", "99", "2024", "1987", "007", "69", "#1", "@home", "_x", "?"];
    /// Characters of l33t words, keyboard patterns, dates and sequences.
    const ALPHABETS: [&str; 10] = [
        "4@8({[<3691!|70$5+%2",
        "i1!|l7t+",
        "a4@A",
        "0123456789",
        "0123456789./-",
        "69",
        "14725836",
        "qwertyuiop[]asdfghjkl;'zxcvbnm,./1234567890-=",
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
        "éßİ漢😀ﬀ\u{301}\u{200d}Ǆ",
    ];

    /// Pseudorandom numbers, the same in each run.
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, bound: usize) -> usize {
            // Knuth's MMIX generator. Its high bits are used, because its low bits are less random.
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(self.0 >> 33).unwrap() % bound
        }

        fn pick<'a>(&mut self, options: &[&'a str]) -> &'a str {
            options[self.below(options.len())]
        }

        fn text(&mut self, alphabet: &str, length: usize) -> String {
            let alphabet: Vec<char> = alphabet.chars().collect();
            (0..length).map(|_| alphabet[self.below(alphabet.len())]).collect()
        }
    }

    /// The score of zxcvbn without the limits of this module.
    fn plain_score(password: &str, guesses: &[String]) -> u8 {
        let guesses: Vec<&str> = guesses.iter().map(String::as_str).collect();
        u8::from(zxcvbn(password, &guesses).score())
    }

    fn guesses_of(email: &str, name: &str) -> Vec<String> {
        password::likely_guesses(Some(&Email::parse(email).unwrap()), Some(&Name::parse(name).unwrap()))
    }

    fn guesses_of_ada() -> Vec<String> {
        guesses_of("ada.lovelace+shop@mail.example-company.co.uk", "Ada Augusta King, Countess of Lovelace")
    }

    fn capitalized(word: &str) -> String {
        word[..1].to_uppercase() + &word[1..]
    }

    /// A thousand passwords of the kinds that people and password managers choose.
    fn ordinary_passwords() -> Vec<String> {
        let mut numbers = Numbers(1);
        let l33t = |word: &str| word.replace('a', "@").replace('o', "0").replace('i', "1").replace('e', "3");
        let printable: String = (' '..='~').collect();
        let mut passwords = Vec::new();
        for turn in 0..100 {
            let word = numbers.pick(&WORDS);
            passwords.push(format!("{word}{}", numbers.pick(&SUFFIXES)));
            passwords.push(format!("{}{}", capitalized(numbers.pick(&WORDS)), numbers.pick(&SUFFIXES)));
            passwords.push(format!("{}{}", l33t(&capitalized(word)), numbers.pick(&SUFFIXES)));
            passwords.push(format!("{}{}{}", word.replace('s', "$"), numbers.below(10_000), numbers.pick(&SUFFIXES)));
            let date = [numbers.below(28) + 1, numbers.below(12) + 1, numbers.below(80) + 1940];
            passwords.push(format!(
                "{word}{:02}{}{:02}{1}{}",
                date[0],
                numbers.pick(&["", ".", "/", "-"]),
                date[1],
                date[2]
            ));
            let keys = numbers.pick(&["qwertyuiop", "asdfghjkl", "1q2w3e4r5t", "zxcvbnm", "987654321", "!@#$%^&*"]);
            passwords.push(format!("{}{}", &keys[..5 + numbers.below(keys.len() - 5)], numbers.pick(&SUFFIXES)));
            let separator = numbers.pick(&["-", " ", "_", ".", ""]);
            let words: Vec<_> = (0..3 + turn % 6).map(|_| numbers.pick(&WORDS)).collect();
            passwords.push(words.join(separator));
            let length = 8 + numbers.below(33);
            passwords.push(numbers.text(&printable, length));
            passwords.push(numbers.text("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", length));
            let user_word = numbers.pick(&["ada", "Lovelace", "lovelace", "countess", "augusta", "example"]);
            passwords.push(format!("{user_word}{}{}", numbers.pick(&WORDS), numbers.pick(&SUFFIXES)));
        }
        passwords
    }

    #[test]
    fn ordinary_passwords_score_as_in_plain_zxcvbn() {
        let passwords = ordinary_passwords();
        assert_eq!(passwords.len(), 1000);
        let guesses = guesses_of_ada();
        let mut scores = [0; 5];
        let mut differences = Vec::new();
        for password in &passwords {
            let expected = plain_score(password, &guesses);
            scores[usize::from(expected)] += 1;
            let actual = score(password, &guesses);
            if actual != expected {
                differences.push((password, expected, actual));
            }
        }
        assert!(differences.is_empty(), "{}: {differences:?}", differences.len());
        assert!(scores.iter().all(|count| *count >= 10), "all scores occur: {scores:?}");
        assert!(passwords.iter().any(|password| password.len() > MAX_WHOLE_CHARS));
    }

    #[test]
    fn a_long_password_of_a_few_easy_parts_scores_no_higher_than_in_plain_zxcvbn() {
        let mut numbers = Numbers(2);
        let guesses = guesses_of_ada();
        let user_texts: &[&str] =
            &["ada.lovelace+shop@mail.example-company.co.uk", "ku.oc.ynapmoc-elpmaxe.liam@pohs+ecalevol.ada"];
        let keyboard_patterns: &[&str] =
            &["qwertyuiopasdfghjklzxcvbnm", "1234567890qwertyuiop", "zaq12wsxcde34rfvbgt56yhnmju78ik"];
        let sequences: &[&str] = &["abcdefghijklmnopqrstuvwxyz", "zyxwvutsrqponmlkjihg", "13579", "αβγδεζηθικλμνξοπ"];
        let words: &[&str] = &["password", "washington", "university", "international", "california", "christopher"];
        let kinds = [user_texts, keyboard_patterns, sequences, words];
        let mut tested = 0;
        let mut too_high = Vec::new();
        while tested < 300 {
            let (mut password, mut unrepeated) = (String::new(), String::new());
            for _ in 0..1 + numbers.below(3) {
                let kind = numbers.below(kinds.len());
                let part = numbers.pick(kinds[kind]);
                if !unrepeated.ends_with(part) {
                    unrepeated += part;
                }
                password += &part.repeat(1 + numbers.below(6));
            }
            if !(MAX_WHOLE_CHARS + 1..=100).contains(&password.chars().count()) {
                continue;
            }
            tested += 1;
            // A repeated part scores like one copy, which plain zxcvbn may rate higher than the repetition.
            let expected = plain_score(&password, &guesses).max(plain_score(&unrepeated, &guesses));
            let actual = score(&password, &guesses);
            if actual > expected {
                too_high.push((password, expected, actual));
            }
        }
        assert!(too_high.is_empty(), "{}: {too_high:?}", too_high.len());
    }

    #[test]
    fn known_user_data_makes_a_weak_password() {
        let guesses = guesses_of_ada();
        let address = "ada.lovelace+shop@mail.example-company.co.uk";
        let reversed: String = address.chars().rev().collect();
        for weak in [
            address.to_owned(),
            address.to_uppercase(),
            reversed,
            address.replace('a', "@").replace('e', "3").replace('o', "0"),
            format!("x{address}"),
            format!("{address}{address}"),
            format!("{address}1"),
        ] {
            assert!(score(&weak, &guesses) <= 1, "{weak}: {}", score(&weak, &guesses));
        }
        let strong = format!("{address} and 7-Harbour-quilts");
        assert_eq!(score(&strong, &guesses), 4, "the text after the address counts");
    }

    /// The passwords that are known to take longest to score, and passwords that cause an overflow in zxcvbn, each with
    /// guess words.
    fn hostile_passwords() -> Vec<(String, Vec<String>)> {
        let cycle = |text: &str, length: usize| text.chars().cycle().take(length).collect::<String>();
        let symbols = "4@8({[<3691!|70$5+%2";
        let mut passwords = vec!["@12.34.5x([<".to_owned(), "\u{301}".repeat(128), "İ".repeat(128)];
        for length in [8, 12, 16, 20, 24, 28, 32, 33, 64, 76, 100, 128] {
            for text in [
                symbols,
                "69",
                "6",
                "7410",
                "@12.34.5x([<",
                "a",
                "4",
                "4@",
                "thecatsatonhermat",
                "1219191119",
                "11/12/1999",
                "qwertyuiop",
                "zaq1xsw2cde3",
                "ß漢😀é",
                "e\u{301}\u{302}",
                "ﬀİǄ",
                "QwErTyUiOp",
                "I1i!|l7T+t",
                "P4$$w0rd1!|1!|",
                "$41!|example44$4example1!|1!|",
                "aaa444aaaaaa1!|1!|",
            ] {
                passwords.push(cycle(text, length));
            }
            let mut numbers = Numbers(length as u64);
            for alphabet in ALPHABETS {
                passwords.push(numbers.text(alphabet, length));
            }
        }
        let mut hostile = Vec::new();
        let nested: Vec<String> = (2..20).map(|length| "a".repeat(length)).collect();
        let all_words: Vec<String> = WORDS.iter().map(|word| (*word).to_owned()).collect();
        for password in passwords {
            let parts = |size| {
                let chars: Vec<char> = password.chars().collect();
                chars.windows(size).map(|part| part.iter().collect()).collect::<Vec<String>>()
            };
            hostile.push((password.clone(), Vec::new()));
            hostile.push((password.clone(), vec![password.clone()]));
            hostile.push((password.clone(), parts(3)));
            hostile.push((password.clone(), nested.clone()));
            hostile.push((password.clone(), [parts(5), all_words.clone()].concat()));
        }
        // The guess words of an address and a name of maximum length.
        let local = "ab.".repeat(21) + "x";
        let domain = "xy.".repeat(62) + "zz";
        let guesses = guesses_of(&format!("{local}@{domain}"), &"a1 ".repeat(66));
        hostile.extend([symbols.repeat(7), format!("{local}@{domain}")].map(|password| (password, guesses.clone())));
        hostile
    }

    /// Runs `work` ten times and returns the shortest time, because other load on the machine only makes a run longer.
    fn shortest_time(mut work: impl FnMut()) -> Duration {
        let times = (0..10).map(|_| {
            let started = Instant::now();
            work();
            started.elapsed()
        });
        times.min().unwrap()
    }

    #[test]
    fn scoring_a_password_takes_less_time_than_hashing() {
        score("The first call reads the dictionaries.", &[]);
        let mut engine = Argon2Engine::new(argon2_simd::Kernel::fastest(), Argon2Class::DEFAULT_NATIVE);
        let hash = shortest_time(|| drop(engine.hash(&Password::new("x"), &[7; 16])));
        for (password, guesses) in hostile_passwords() {
            let measure = || shortest_time(|| assert!(score(&password, &guesses) <= 4));
            // Other tests can slow down all ten runs of one measurement.
            let mut took = measure();
            for _ in 0..5 {
                if took >= hash {
                    took = took.min(measure());
                }
            }
            assert!(took < hash, "{took:?}, a hash {hash:?}: {password} {guesses:?}");
        }
    }

    #[test]
    fn every_password_has_a_score() {
        let mut numbers = Numbers(3);
        for _ in 0..2000 {
            let alphabet = numbers.pick(&ALPHABETS);
            let length = numbers.below(129);
            let (part, copies) = (numbers.below(16), numbers.below(9));
            let password = numbers.text(alphabet, length) + &numbers.text(alphabet, part).repeat(copies);
            let guesses: Vec<String> = (0..numbers.below(30))
                .map(|_| {
                    let chars: Vec<char> = password.chars().collect();
                    let start = numbers.below(chars.len() + 1);
                    let end = start + numbers.below(chars.len() + 1 - start);
                    chars[start..end].iter().copied().map(fold_lookalikes).collect()
                })
                .collect();
            assert!(score(&password, &guesses) <= 4, "{password} {guesses:?}");
        }
    }

    #[test]
    fn count_interpretations_returns_the_number_of_searches_of_zxcvbn() {
        let of = |text: &str| count_interpretations(&text.chars().collect::<Vec<_>>());
        for (text, expected) in
            [("", 1), ("4", 1), ("4@", 2), ("1", 2), ("7", 2), ("17", 4), ("1!|7+", 25), ("0123456789", 8)]
        {
            assert_eq!(of(text), expected, "{text}");
        }
        let mut all_symbols: Vec<char> = "4@8({[<3691!|70$5+%2".repeat(2)[..MAX_WHOLE_CHARS].chars().collect();
        limit_interpretations(&mut all_symbols, &mut [], MAX_WHOLE_CHARS);
        assert_eq!(count_interpretations(&all_symbols), 8);
    }
}
