//! Parses times in the formats of other login services.

use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// The Unix seconds of a time such as `2024-05-06T07:08:09.123456+00:00`. Postgres also writes a space instead of the
/// `T`, and an offset without minutes.
pub(crate) fn parse(text: &str) -> Option<i64> {
    let mut text = text.trim().replacen(' ', "T", 1);
    let zone = text.get(10..)?.find(['+', '-']).map(|at| at + 10);
    match zone.and_then(|at| text.get(at + 1..)) {
        Some(hours) if hours.len() == 2 => text.push_str(":00"),
        None if !text.ends_with(['Z', 'z']) => text.push('Z'),
        _ => {}
    }
    OffsetDateTime::parse(&text, &Rfc3339).ok().map(OffsetDateTime::unix_timestamp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_in_all_forms() {
        for text in [
            "2024-05-06T07:08:09Z",
            "2024-05-06T07:08:09.123456+00:00",
            "2024-05-06 07:08:09.1+00",
            "2024-05-06T09:08:09+02:00",
            "2024-05-06T02:08:09-05",
            "2024-05-06T07:08:09.000",
        ] {
            assert_eq!(parse(text), Some(1_714_979_289), "{text}");
        }
        for text in ["", "yesterday", "2024-05-06", "2024-13-06T07:08:09Z", "é".repeat(9).as_str()] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
