//! Netlink attributes as bytes, for messages that the packet crates have no types for.

use netlink_packet_core::{Emitable, NLA_F_NESTED, NlasIterator};

/// Calls `each` with kind and value of every attribute, as far as their lengths are in order.
pub fn each(bytes: &[u8], mut each: impl FnMut(u16, &[u8])) {
    for attribute in NlasIterator::new(bytes).map_while(Result::ok) {
        each(attribute.kind(), attribute.value());
    }
}

/// A number of 1 or 4 bytes; none for a value that is shorter than 4 bytes.
pub fn number(value: &[u8]) -> Option<u32> {
    match value {
        [byte] => Some(u32::from(*byte)),
        value => value.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes)),
    }
}

/// Puts a value into a structure of the kernel's, as far as there is room.
pub fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    for (to, from) in bytes.iter_mut().skip(at).zip(value) {
        *to = *from;
    }
}

/// The number at a place of such a structure; 0 behind its end.
pub fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(<[u8]>::first_chunk);
    word.map(|word| u32::from_ne_bytes(*word)).unwrap_or(0)
}

/// A message in the making: a header, then attributes, each padded to 4 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Raw(Vec<u8>);

impl Raw {
    /// A message with this header, or attributes alone when it is empty.
    pub fn new(header: &[u8]) -> Self {
        Raw(header.to_vec())
    }

    #[must_use]
    pub fn with(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.0.extend_from_slice(&length.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// With one more attribute that holds others.
    #[must_use]
    pub fn nest(self, kind: u16, inner: &Raw) -> Self {
        self.with(kind | NLA_F_NESTED, &inner.0)
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Emitable for Raw {
    fn buffer_len(&self) -> usize {
        self.0.len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        put(buffer, 0, &self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_read_back_as_they_were_put() {
        let inner = Raw::default().with(3, b"abc");
        let message = Raw::new(&[9; 8]).with(1, &[7]).nest(2, &inner);
        assert_eq!(message.as_bytes().len() % 4, 0);
        let mut seen = Vec::new();
        each(&message.as_bytes()[8..], |kind, value| {
            seen.push((kind, value.to_vec()))
        });
        assert_eq!(seen, [(1, vec![7]), (2, inner.as_bytes().to_vec())]);
        assert_eq!(number(&[7]), Some(7));
        assert_eq!(number(&7u32.to_ne_bytes()), Some(7));
        assert_eq!(number(&[1, 2]), None);
    }
}
