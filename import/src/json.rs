//! Reads records out of JSON documents of any size, and out of files with one record on each line, one at a time.
//!
//! A record is parsed twice: first as text, to find its end, and then as the type that its format demands. So a record
//! of an unexpected type does not end the import.

use std::{
    cell::Cell,
    fmt,
    io::{self, BufRead, Read},
    rc::Rc,
};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::{error::ImportError, input};

/// Maximum size of a record, and of any value between records, in bytes. A larger one ends the import, because the
/// memory of the import must not depend on its input.
pub(crate) const MAX_RECORD: usize = 2 * 1024 * 1024;
/// Maximum size of free-form JSON that is parsed into a tree. A tree needs up to about 100 times as much memory as its
/// text.
const MAX_TREE_TEXT: usize = 64 * 1024;
/// Maximum number of items in a list of a record. More items than this have no use, and their memory must be limited.
const MAX_ITEMS: usize = 1000;

/// What the reader of an import format expects in JSON documents.
pub(crate) struct Shape {
    /// Names of the members that are arrays of records.
    pub arrays: &'static [&'static str],
    /// Names of the text members that the reader needs.
    pub texts: &'static [&'static str],
    /// What the items are if the document itself is an array: records or documents.
    pub top_array: TopArray,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum TopArray {
    Records,
    Documents,
}

/// Receives the parts of a document in their order.
pub(crate) trait Handler {
    /// Receives the text of a member in [`Shape::texts`].
    fn text(&mut self, _member: &str, _value: String) -> Result<(), ImportError> {
        Ok(())
    }
    /// Called at the beginning of an array of records.
    fn array(&mut self, _member: &str) {}
    /// Receives a record of the array `member`. `member` is empty if the document itself is an array.
    fn record(&mut self, member: &str, record: &str) -> Result<(), ImportError>;
}

/// Reads all documents of a file. They can follow one another without a separator.
pub(crate) fn read_documents<R: Read>(
    name: &str,
    reader: R,
    shape: &Shape,
    handler: &mut dyn Handler,
) -> Result<(), ImportError> {
    let budget = Budget::default();
    let input_error = |error| ImportError::Input { name: name.to_owned(), error };
    let limited = LimitedReader::new(reader, &budget);
    let mut deserializer = serde_json::Deserializer::from_reader(input::buffer(limited).map_err(input_error)?);
    let mut failure = None;
    loop {
        budget.reset();
        let document = DocumentReader { shape, budget: &budget, handler, failure: &mut failure };
        let result = document.deserialize(&mut deserializer);
        if let Some(failure) = failure.take() {
            return Err(failure);
        }
        if let Err(error) = result {
            let (line, column) = (error.line(), error.column());
            return Err(if error.is_io() {
                input_error(error.into())
            } else {
                ImportError::Syntax { name: name.to_owned(), line, column }
            });
        }
        budget.reset();
        if deserializer.end().is_ok() {
            return Ok(());
        }
    }
}

/// A line of a file with one JSON object per line.
pub(crate) enum Line<'a> {
    Text(&'a [u8]),
    /// The line is larger than [`MAX_RECORD`].
    TooLong,
}

/// Calls `handle` for each line that is not blank, with its number from 1.
pub(crate) fn read_lines<R: Read>(
    name: &str,
    reader: R,
    mut handle: impl FnMut(usize, Line<'_>) -> Result<(), ImportError>,
) -> Result<(), ImportError> {
    let input_error = |error| ImportError::Input { name: name.to_owned(), error };
    let mut reader = input::buffer(reader).map_err(input_error)?;
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let (mut is_too_long, mut is_last) = (false, true);
        loop {
            let available = match reader.fill_buf() {
                Ok(available) => available,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(input_error(error)),
            };
            if available.is_empty() {
                break;
            }
            let newline = available.iter().position(|byte| *byte == b'\n');
            let (part, used) = newline.map_or((available, available.len()), |at| (&available[..at], at + 1));
            is_too_long |= line.len() + part.len() > MAX_RECORD;
            if !is_too_long {
                line.extend_from_slice(part);
            }
            reader.consume(used);
            if newline.is_some() {
                is_last = false;
                break;
            }
        }
        if is_too_long {
            handle(number, Line::TooLong)?;
        } else if !line.trim_ascii().is_empty() {
            handle(number, Line::Text(line.trim_ascii()))?;
        }
        if is_last {
            break;
        }
    }
    Ok(())
}

/// Parses a record. The error of serde is dropped, because it can quote the record.
pub(crate) fn parse<T: DeserializeOwned>(record: &str) -> Option<T> {
    serde_json::from_str(record).ok()
}

/// Free-form JSON of a record: text that is not yet parsed.
pub(crate) type Raw = Option<Box<RawValue>>;

/// The value of free-form JSON. `None` if it is absent, null, or too large to be parsed.
pub(crate) fn tree(raw: &Raw) -> Option<serde_json::Value> {
    let text = raw.as_ref()?.get();
    if text.len() > MAX_TREE_TEXT {
        return None;
    }
    serde_json::from_str(text).ok().filter(|value: &serde_json::Value| !value.is_null())
}

/// Whether free-form JSON is present and is not null, `{}`, `[]` or `""`.
pub(crate) fn has_content(raw: &Raw) -> bool {
    raw.as_ref().is_some_and(|raw| {
        let mut characters = raw.get().chars().filter(|c| !c.is_whitespace());
        let start: String = characters.by_ref().take(5).collect();
        !matches!(start.as_str(), "null" | "{}" | "[]" | "\"\"")
    })
}

/// A list with a limited number of items. Null is an empty list.
#[derive(Debug)]
pub(crate) struct Items<T>(pub Vec<T>);

/// The number of bytes that can still be read before the next record begins. The reader and the parser share it.
#[derive(Clone)]
pub(crate) struct Budget(Rc<Cell<usize>>);

/// Fails if a record is larger than the budget. The limit is approximate, because the reader reads ahead.
pub(crate) struct LimitedReader<R> {
    inner: R,
    budget: Budget,
}

struct DocumentReader<'a> {
    shape: &'a Shape,
    budget: &'a Budget,
    handler: &'a mut dyn Handler,
    failure: &'a mut Option<ImportError>,
}

struct ArrayReader<'a, 'b> {
    member: &'b str,
    document: &'b mut DocumentReader<'a>,
}

/// Skips a value of any size, with a depth of at most 128.
#[derive(Clone, Copy)]
struct Skip<'a>(&'a Budget);

// === impl Budget ===

impl Default for Budget {
    fn default() -> Self {
        Self(Rc::new(Cell::new(MAX_RECORD)))
    }
}

impl Budget {
    pub(crate) fn reset(&self) {
        self.0.set(MAX_RECORD);
    }
}

impl<R> LimitedReader<R> {
    pub(crate) fn new(inner: R, budget: &Budget) -> Self {
        Self { inner, budget: budget.clone() }
    }
}

impl<R: Read> Read for LimitedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        let left = self.budget.0.get().checked_sub(read).ok_or_else(|| io::Error::other("a value is above 2 MiB"))?;
        self.budget.0.set(left);
        Ok(read)
    }
}

// === impl DocumentReader ===

impl DocumentReader<'_> {
    /// Stores an error of the handler in `failure`, because an error of serde cannot contain it.
    fn check<E: serde::de::Error>(&mut self, result: Result<(), ImportError>) -> Result<(), E> {
        result.map_err(|error| {
            *self.failure = Some(error);
            E::custom("the handler failed")
        })
    }
}

impl<'de> DeserializeSeed<'de> for DocumentReader<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for DocumentReader<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or an array")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut members: A) -> Result<(), A::Error> {
        while let Some(member) = members.next_key::<String>()? {
            self.budget.reset();
            if self.shape.arrays.contains(&member.as_str()) {
                members.next_value_seed(ArrayReader { member: &member, document: &mut self })?;
            } else if self.shape.texts.contains(&member.as_str()) {
                let value = members.next_value::<String>()?;
                let result = self.handler.text(&member, value);
                self.check(result)?;
            } else {
                members.next_value_seed(Skip(self.budget))?;
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        match self.shape.top_array {
            TopArray::Records => ArrayReader { member: "", document: &mut self }.visit_seq(items),
            TopArray::Documents => loop {
                self.budget.reset();
                let item = DocumentReader {
                    shape: self.shape,
                    budget: self.budget,
                    handler: &mut *self.handler,
                    failure: &mut *self.failure,
                };
                if items.next_element_seed(item)?.is_none() {
                    return Ok(());
                }
            },
        }
    }
}

// === impl ArrayReader ===

impl<'de> DeserializeSeed<'de> for ArrayReader<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ArrayReader<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        self.document.handler.array(self.member);
        loop {
            self.document.budget.reset();
            let Some(record) = items.next_element::<Box<RawValue>>()? else { return Ok(()) };
            let result = self.document.handler.record(self.member, record.get());
            self.document.check(result)?;
        }
    }
}

// === impl Skip ===

impl<'de> DeserializeSeed<'de> for Skip<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.0.reset();
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Skip<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(self)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while members.next_key::<IgnoredAny>()?.is_some() {
            members.next_value_seed(self)?;
        }
        Ok(())
    }
}

// === impl Items ===

impl<T> Default for Items<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Items<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemsVisitor<T>(Vec<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for ItemsVisitor<T> {
            type Value = Items<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array")
            }

            fn visit_unit<E>(self) -> Result<Items<T>, E> {
                Ok(Items(self.0))
            }

            fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<Items<T>, A::Error> {
                while let Some(item) = items.next_element()? {
                    if self.0.len() == MAX_ITEMS {
                        return Err(serde::de::Error::custom("too many items"));
                    }
                    self.0.push(item);
                }
                Ok(Items(self.0))
            }
        }

        deserializer.deserialize_any(ItemsVisitor(Vec::new()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { arrays: &["users"], texts: &["realm"], top_array: TopArray::Documents };

    #[derive(Default)]
    struct Recorder(Vec<String>);

    impl Handler for Recorder {
        fn text(&mut self, member: &str, value: String) -> Result<(), ImportError> {
            self.0.push(format!("{member}={value}"));
            Ok(())
        }

        fn record(&mut self, member: &str, record: &str) -> Result<(), ImportError> {
            if record == "\"stop\"" {
                return Err(ImportError::Usage("stopped".to_owned()));
            }
            self.0.push(format!("{member}:{record}"));
            Ok(())
        }
    }

    fn read(text: &str) -> Result<Vec<String>, ImportError> {
        let mut recorder = Recorder::default();
        read_documents("a.json", text.as_bytes(), &SHAPE, &mut recorder).map(|()| recorder.0)
    }

    #[test]
    fn records_are_found_between_other_members() {
        let text = r#"{"a":[1,{"users":[0]},null,"x",1.5,true,-1],"realm":"shop","users":[{"id":1}, 2 ],"z":{}}"#;
        assert_eq!(read(text).unwrap(), ["realm=shop", "users:{\"id\":1}", "users:2"]);
        assert_eq!(read(r#"[{"users":null},{"users":[1]}]"#).unwrap(), ["users:1"]);
        assert_eq!(read("{\"users\":[1]}\n{\"users\":[2]} ").unwrap(), ["users:1", "users:2"]);
    }

    #[test]
    fn an_error_names_the_position_and_never_quotes_the_input() {
        for text in
            ["", "{", r#"{"users":[{"secret":}]}"#, "secret", r#"{"realm":["secret"]}"#, "1", "\u{feff}\u{feff}"]
        {
            let error = read(text).unwrap_err().to_string();
            assert!(error.starts_with("a.json is not JSON, at line "), "{text}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
        assert_eq!(read(r#"{"users":["stop"]}"#).unwrap_err().to_string(), "stopped");
    }

    #[test]
    fn a_byte_order_mark_is_skipped() {
        assert_eq!(read("\u{feff}{\"users\":[1]}").unwrap(), ["users:1"]);
    }

    #[test]
    fn a_large_value_ends_the_import_but_many_small_values_do_not() {
        let large = "x".repeat(MAX_RECORD + 128 * 1024);
        for text in [format!(r#"{{"users":["{large}"]}}"#), format!(r#"{{"a":"{large}"}}"#), " ".repeat(large.len())] {
            let error = read(&text).unwrap_err().to_string();
            assert_eq!(error, "cannot read a.json: a value is above 2 MiB");
        }
        let many = format!(r#"{{"a":[{}0],"users":[{}0]}}"#, "\"xxxxxxxx\",".repeat(400_000), "1,".repeat(2_000_000));
        assert_eq!(read(&many).unwrap().len(), 2_000_001);
        let deep = format!(r#"{{"a":{}"#, "[".repeat(1_000_000));
        assert!(matches!(read(&deep), Err(ImportError::Syntax { .. })));
    }

    #[test]
    fn line_numbers_include_blank_lines_and_a_long_line_is_reported() {
        let text = format!("\u{feff}a\n\n \r\nb\r\n{}\nc", "x".repeat(MAX_RECORD + 1));
        let mut seen = Vec::new();
        read_lines("a", text.as_bytes(), |number, line| {
            seen.push((
                number,
                if let Line::Text(text) = line { String::from_utf8_lossy(text).into_owned() } else { "?".into() },
            ));
            Ok(())
        })
        .unwrap();
        let expected = [(1, "a"), (4, "b"), (5, "?"), (6, "c")];
        assert_eq!(seen, expected.map(|(number, text)| (number, text.to_owned())));
    }

    #[test]
    fn the_length_of_lists_in_a_record_is_limited() {
        assert!(parse::<Items<u8>>("null").unwrap().0.is_empty());
        assert_eq!(parse::<Items<u8>>("[1,2]").unwrap().0, [1, 2]);
        assert!(parse::<Items<u8>>(&format!("[{}1]", "1,".repeat(MAX_ITEMS))).is_none());
    }
}
