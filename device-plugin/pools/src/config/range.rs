//! Sets of small numbers as people write them: `0-3,7`.

use std::fmt;

/// A set of numbers written as ranges.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RangeSet {
    ranges: Vec<(u32, u32)>,
}

impl RangeSet {
    /// Reads `0-3,7`; empty parts, words and backward ranges are errors.
    pub fn parse(text: &str) -> Result<Self, String> {
        let refuse = |reason| format!("range {text:?}: {reason}; write it as 0-3,7");
        let number = |word: &str| {
            if word.is_empty() || !word.bytes().all(|b| b.is_ascii_digit()) {
                return Err(refuse("not a number"));
            }
            word.parse::<u32>().map_err(|_| refuse("number too large"))
        };
        let mut ranges = Vec::new();
        for part in text.split(',') {
            let part = part.trim();
            let (low, high) = match part.split_once('-') {
                Some((low, high)) => (number(low.trim())?, number(high.trim())?),
                None => (number(part)?, number(part)?),
            };
            if high < low {
                return Err(refuse("runs backwards"));
            }
            ranges.push((low, high));
        }
        Ok(Self { ranges })
    }

    /// All numbers from the one to the other.
    pub fn from_to(low: u32, high: u32) -> Self {
        Self {
            ranges: vec![(low, high)],
        }
    }

    /// Whether `number` is in the set.
    pub fn contains(&self, number: u32) -> bool {
        self.ranges
            .iter()
            .any(|(low, high)| (*low..=*high).contains(&number))
    }

    /// Adds all of `other`.
    pub fn extend(&mut self, other: RangeSet) {
        self.ranges.extend(other.ranges);
    }
}

impl fmt::Display for RangeSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = self.ranges.iter().map(|(low, high)| match low == high {
            true => low.to_string(),
            false => format!("{low}-{high}"),
        });
        formatter.write_str(&ranges.collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_ranges_and_single_numbers() {
        let set = RangeSet::parse("0-3,7, 9-9").unwrap();
        let members: Vec<u32> = (0..12).filter(|n| set.contains(*n)).collect();
        assert_eq!(members, [0, 1, 2, 3, 7, 9]);
        assert_eq!(set.to_string(), "0-3,7,9");
    }

    #[test]
    fn refuses_what_is_no_range() {
        for text in [
            "",
            ",",
            "1,",
            "a",
            "3-1",
            "1-2-3",
            "-1",
            "1-",
            "4294967296",
            "+1",
            "1..3",
        ] {
            assert!(RangeSet::parse(text).is_err(), "{text:?}");
        }
    }
}
