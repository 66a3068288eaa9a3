//! Joins records of several files by a key, for files that are larger than the memory: an external merge sort.
//!
//! Entries are collected in memory up to a limit, sorted, and written to a temporary file, a *run*. At the end, the
//! runs are merged. The temporary files have no name, and only this process can open them. When the process ends, the
//! system removes them. They contain what the input contains, including password hashes.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    fs::File,
    io::{self, BufReader, BufWriter, Read, Seek, Write},
};

/// Maximum size of a key, in bytes. The merge keeps a key of each run in memory.
pub(crate) const MAX_KEY: usize = 1024;
/// Size of the entries that are sorted in memory and written as one run.
const RUN_BYTES: usize = 8 * 1024 * 1024;
/// How many runs are merged into one. Each run that is read needs a buffer of [`RUN_BUFFER_BYTES`].
const FAN_IN: usize = 32;
const RUN_BUFFER_BYTES: usize = 64 * 1024;
/// Memory of an entry in addition to its key and payload.
const ENTRY_OVERHEAD: usize = size_of::<Position>();

/// The part of a join to which an entry belongs: users are first, and the rows that are joined to them are second.
/// Entries with the same key are sorted by part, and then in the order of their insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    First,
    Second,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub key: Vec<u8>,
    pub part: Part,
    pub payload: Vec<u8>,
}

/// Sorts entries, which can be added in any order.
pub(crate) struct Sorter {
    run_bytes: usize,
    /// The bytes of the keys and payloads of all entries that are not yet in a run.
    arena: Vec<u8>,
    positions: Vec<Position>,
    /// The runs by level. Runs that were sorted in memory have level 0. A merge of runs makes a run of the next level.
    /// Runs of higher levels are older.
    levels: Vec<Vec<File>>,
}

#[derive(Clone, Copy)]
struct Position {
    start: u32,
    key_len: u32,
    payload_len: u32,
    part: Part,
}

/// The sorted entries, which are read one after another from the runs.
pub(crate) struct Sorted {
    runs: Vec<Run>,
    /// For each run that is not at its end, the head of its next entry: everything except the payload.
    heap: BinaryHeap<Reverse<Head>>,
}

struct Run {
    reader: BufReader<File>,
    left: u64,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Head {
    key: Vec<u8>,
    part: Part,
    run: usize,
    payload_len: u32,
}

// === impl Sorter ===

impl Sorter {
    pub(crate) fn new() -> Self {
        Self::with_run_bytes(RUN_BYTES)
    }

    fn with_run_bytes(run_bytes: usize) -> Self {
        Self { run_bytes, arena: Vec::new(), positions: Vec::new(), levels: Vec::new() }
    }

    /// Adds an entry. Its key must have at most [`MAX_KEY`] bytes. Its payload must not be larger than a record
    /// ([`crate::json::MAX_RECORD`]).
    pub(crate) fn push(&mut self, key: &[u8], part: Part, payload: &[u8]) -> io::Result<()> {
        let needed = key.len() + payload.len() + (self.positions.len() + 1) * ENTRY_OVERHEAD;
        if !self.positions.is_empty() && self.arena.len() + needed > self.run_bytes {
            self.write_run()?;
        }
        let too_large = |_| io::Error::other("an entry is too large");
        self.positions.push(Position {
            start: self.arena.len().try_into().map_err(too_large)?,
            key_len: key.len().try_into().map_err(too_large)?,
            payload_len: payload.len().try_into().map_err(too_large)?,
            part,
        });
        self.arena.extend_from_slice(key);
        self.arena.extend_from_slice(payload);
        Ok(())
    }

    pub(crate) fn sort(mut self) -> io::Result<Sorted> {
        self.write_run()?;
        (self.arena, self.positions) = (Vec::new(), Vec::new());
        // Oldest runs first, so that entries with the same key and part keep their order.
        Sorted::new(self.levels.into_iter().rev().flatten())
    }

    fn write_run(&mut self) -> io::Result<()> {
        if self.positions.is_empty() {
            return Ok(());
        }
        let arena = &self.arena;
        let key = |position: &Position| &arena[position.start as usize..][..position.key_len as usize];
        self.positions.sort_unstable_by(|a, b| (key(a), a.part, a.start).cmp(&(key(b), b.part, b.start)));
        let mut run = RunWriter::new()?;
        for position in &self.positions {
            let end = (position.start + position.key_len) as usize;
            run.entry(key(position), position.part, position.payload_len)?;
            run.writer.write_all(&arena[end..][..position.payload_len as usize])?;
        }
        let run = run.finish()?;
        self.arena.clear();
        self.positions.clear();
        self.add_run(run)
    }

    fn add_run(&mut self, mut run: File) -> io::Result<()> {
        for level in 0.. {
            if self.levels.len() == level {
                self.levels.push(Vec::new());
            }
            self.levels[level].push(run);
            if self.levels[level].len() < FAN_IN {
                break;
            }
            let mut merged = Sorted::new(self.levels[level].drain(..))?;
            let mut writer = RunWriter::new()?;
            while let Some(head) = merged.pop()? {
                writer.entry(&head.key, head.part, head.payload_len)?;
                let mut payload = (&mut merged.runs[head.run].reader).take(head.payload_len.into());
                if io::copy(&mut payload, &mut writer.writer)? != u64::from(head.payload_len) {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                merged.advance(head.run)?;
            }
            run = writer.finish()?;
        }
        Ok(())
    }
}

// === impl Sorted ===

impl Sorted {
    fn new(runs: impl Iterator<Item = File>) -> io::Result<Self> {
        let mut sorted = Self { runs: Vec::new(), heap: BinaryHeap::new() };
        for mut file in runs {
            let left = file.stream_position()?;
            file.rewind()?;
            sorted.runs.push(Run { reader: BufReader::with_capacity(RUN_BUFFER_BYTES, file), left });
            sorted.advance(sorted.runs.len() - 1)?;
        }
        Ok(sorted)
    }

    pub(crate) fn next(&mut self) -> io::Result<Option<Entry>> {
        let Some(head) = self.pop()? else { return Ok(None) };
        let mut payload = vec![0; head.payload_len as usize];
        self.runs[head.run].reader.read_exact(&mut payload)?;
        self.advance(head.run)?;
        Ok(Some(Entry { key: head.key, part: head.part, payload }))
    }

    /// Removes the head of the next entry from the heap and returns it. The caller reads the payload of this entry, and
    /// then calls [`Sorted::advance`].
    fn pop(&mut self) -> io::Result<Option<Head>> {
        Ok(self.heap.pop().map(|Reverse(head)| head))
    }

    /// Reads the head of the next entry of a run.
    fn advance(&mut self, number: usize) -> io::Result<()> {
        let run = &mut self.runs[number];
        if run.left == 0 {
            return Ok(());
        }
        let mut header = [0; HEADER_BYTES];
        run.reader.read_exact(&mut header)?;
        let [a, b, c, d, e, f, g, h, part] = header;
        let (key_len, payload_len) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        let part = if part == 0 { Part::First } else { Part::Second };
        let size = HEADER_BYTES as u64 + u64::from(key_len) + u64::from(payload_len);
        run.left = run.left.checked_sub(size).ok_or(io::ErrorKind::UnexpectedEof)?;
        let mut key = vec![0; key_len as usize];
        run.reader.read_exact(&mut key)?;
        self.heap.push(Reverse(Head { key, part, run: number, payload_len }));
        Ok(())
    }
}

/// Size of the header of an entry, in bytes: two lengths and a part.
const HEADER_BYTES: usize = 9;

struct RunWriter {
    writer: BufWriter<File>,
}

impl RunWriter {
    fn new() -> io::Result<Self> {
        Ok(Self { writer: BufWriter::with_capacity(RUN_BUFFER_BYTES, tempfile::tempfile()?) })
    }

    /// Writes an entry except for its payload, which the caller writes.
    fn entry(&mut self, key: &[u8], part: Part, payload_len: u32) -> io::Result<()> {
        let key_len = u32::try_from(key.len()).map_err(|_| io::Error::other("a key is too large"))?;
        self.writer.write_all(&key_len.to_le_bytes())?;
        self.writer.write_all(&payload_len.to_le_bytes())?;
        self.writer.write_all(&[part as u8])?;
        self.writer.write_all(key)
    }

    fn finish(self) -> io::Result<File> {
        self.writer.into_inner().map_err(io::IntoInnerError::into_error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(sorter: Sorter) -> Vec<(String, Part, String)> {
        let mut sorted = sorter.sort().unwrap();
        let mut entries = Vec::new();
        while let Some(entry) = sorted.next().unwrap() {
            let text = |bytes| String::from_utf8(bytes).unwrap();
            entries.push((text(entry.key), entry.part, text(entry.payload)));
        }
        entries
    }

    #[test]
    fn entries_are_sorted_by_key_part_and_insertion_over_many_levels_of_runs() {
        // Two entries for each run, so that 5,000 entries need runs of three levels.
        let mut sorter = Sorter::with_run_bytes(2 * (ENTRY_OVERHEAD + 8));
        let mut expected = Vec::new();
        for number in 0..5000_u32 {
            let key = format!("{:03}", number.wrapping_mul(2_654_435_761) % 300);
            let part = if number % 3 == 0 { Part::First } else { Part::Second };
            sorter.push(key.as_bytes(), part, number.to_string().as_bytes()).unwrap();
            expected.push((key, part, number.to_string()));
        }
        assert!(sorter.levels.len() >= 3, "{} levels", sorter.levels.len());
        assert!(sorter.levels.iter().all(|level| level.len() < FAN_IN));
        expected.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
        assert_eq!(drain(sorter), expected);
    }

    #[test]
    fn entries_can_be_empty_or_larger_than_a_run() {
        assert!(drain(Sorter::new()).is_empty());
        let mut sorter = Sorter::with_run_bytes(10);
        let large = "x".repeat(RUN_BUFFER_BYTES * 2);
        sorter.push(b"b", Part::Second, large.as_bytes()).unwrap();
        sorter.push(b"", Part::First, b"").unwrap();
        let expected = [(String::new(), Part::First, String::new()), ("b".to_owned(), Part::Second, large)];
        assert_eq!(drain(sorter), expected);
    }
}
