//! Turns the bytes of an input into values for a fuzz target.

use std::borrow::Cow;

/// The unread bytes of an input. After the end of the input, all bytes are zero, so that every input is valid.
pub(crate) struct Draw<'a>(&'a [u8]);

/// Maximum length of the result of [`Draw::text`], in bytes.
const MAX_TEXT_BYTES: usize = 4096;

/// Returns two texts: the input itself, and a sequence of fragments, one for each byte of the input. The fragments are
/// useful because random bytes rarely form valid syntax.
pub(crate) fn texts<'a>(input: &'a [u8], fragments: &[&str]) -> [Cow<'a, str>; 2] {
    let joined: String = input.iter().map(|byte| fragments[usize::from(*byte) % fragments.len()]).collect();
    [String::from_utf8_lossy(input), Cow::Owned(joined)]
}

// === impl Draw ===

impl<'a> Draw<'a> {
    pub(crate) fn new(input: &'a [u8]) -> Self {
        Self(input)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    pub(crate) fn number(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number less than `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::from(u16::from_le_bytes(self.array())) % end
    }

    pub(crate) fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[usize::from(self.byte()) % list.len()].clone()
    }

    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let (taken, rest) = self.0.split_at(self.0.len().min(N));
        array[..taken.len()].copy_from_slice(taken);
        self.0 = rest;
        array
    }

    /// A text of up to 15 fragments. One fragment in 32 is repeated 256 to 2048 times, because deep or long input can
    /// break a parser.
    pub(crate) fn text(&mut self, fragments: &[&str]) -> String {
        let mut text = String::new();
        for _ in 0..self.byte() & 15 {
            let times = match self.byte() {
                large @ 248.. => 1 << (large - 240).min(11),
                _ => 1,
            };
            let fragment = self.pick(fragments);
            text.push_str(&fragment.repeat(times.min((MAX_TEXT_BYTES - text.len()) / fragment.len().max(1))));
        }
        text
    }

    /// Text of up to `max_chars` arbitrary characters.
    pub(crate) fn any_text(&mut self, max_chars: usize) -> String {
        let length = self.below(max_chars + 1).min(self.0.len());
        let (taken, rest) = self.0.split_at(length);
        self.0 = rest;
        String::from_utf8_lossy(taken).into_owned()
    }

    /// All unread bytes.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}
