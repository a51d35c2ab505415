//! Splits a list of the API into its items while it arrives.
//!
//! A list of all blocks of a large cluster is tens of megabytes, of which a broker keeps a name for
//! each object. So no more than one item is in memory at a time.

use serde_json::Value;

/// An item of a list, or an event of a watch, is no longer than this, in bytes: etcd stores 1.5 MiB.
pub const MAX_ITEM_BYTES: usize = 4 << 20;

/// What is wrong with a list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ItemsError {
    /// It is no JSON object with `items`.
    #[error("the list is malformed: {0}")]
    Malformed(&'static str),
    /// An item is too long.
    #[error("an item of the list is longer than {MAX_ITEM_BYTES} bytes")]
    TooLong,
}

/// Reads the bytes of a list in pieces of any length.
#[derive(Debug, Default)]
pub struct Items {
    /// Of brackets and braces that are open.
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// The last string at depth 1: the key of what follows.
    key: Vec<u8>,
    in_items: bool,
    /// Bytes of the item or of the list's metadata that has begun.
    text: Vec<u8>,
    taking: Taking,
    metadata: Option<Value>,
    ended: bool,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Taking {
    #[default]
    Nothing,
    Key,
    Item,
    Metadata,
}

impl Items {
    /// Takes a piece, and gives each item that it completes to `each`.
    pub fn feed<E: From<ItemsError>>(
        &mut self,
        piece: &[u8],
        mut each: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        for &byte in piece {
            if self.taking != Taking::Nothing {
                self.text.push(byte);
                if self.text.len() > MAX_ITEM_BYTES {
                    return Err(ItemsError::TooLong.into());
                }
            }
            if self.in_string {
                self.string(byte);
                continue;
            }
            match byte {
                b'"' => {
                    self.in_string = true;
                    if self.depth == 1 {
                        self.take(Taking::Key, &[]);
                    }
                }
                b'{' | b'[' => {
                    if self.ended || (self.depth == 0 && byte == b'[') {
                        return Err(ItemsError::Malformed("it is no JSON object").into());
                    }
                    match self.depth {
                        1 if self.key == b"items" => self.in_items = byte == b'[',
                        1 if self.key == b"metadata" => self.take(Taking::Metadata, &[byte]),
                        2 if self.in_items => self.take(Taking::Item, &[byte]),
                        _ => {}
                    }
                    self.depth += 1;
                }
                b'}' | b']' => {
                    self.depth = self
                        .depth
                        .checked_sub(1)
                        .ok_or(ItemsError::Malformed("more is closed than was opened"))?;
                    match (self.depth, &self.taking) {
                        (2, Taking::Item) => {
                            each(&self.text)?;
                            self.take(Taking::Nothing, &[]);
                        }
                        (1, Taking::Metadata) => {
                            self.metadata = serde_json::from_slice(&self.text).ok();
                            self.take(Taking::Nothing, &[]);
                        }
                        (1, _) => self.in_items = false,
                        (0, _) => self.ended = true,
                        _ => {}
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn string(&mut self, byte: u8) {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' => self.escaped = true,
            b'"' => {
                self.in_string = false;
                if self.taking == Taking::Key {
                    self.text.pop();
                    self.key.clone_from(&self.text);
                    self.take(Taking::Nothing, &[]);
                }
            }
            _ => {}
        }
    }

    fn take(&mut self, what: Taking, first: &[u8]) {
        self.taking = what;
        self.text.clear();
        self.text.extend_from_slice(first);
    }

    /// The list's own metadata, once all of it was read.
    ///
    /// # Errors
    /// It was cut short: items may be missing.
    pub fn end(self) -> Result<Value, ItemsError> {
        if !self.ended {
            return Err(ItemsError::Malformed("it was cut short"));
        }
        self.metadata
            .ok_or(ItemsError::Malformed("it has no metadata"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn split(text: &[u8], piece: usize) -> Result<(Vec<Value>, Value), ItemsError> {
        let (mut items, mut found) = (Items::default(), Vec::new());
        for piece in text.chunks(piece) {
            items.feed(piece, |item| {
                found
                    .push(serde_json::from_slice(item).map_err(|_| ItemsError::Malformed("item"))?);
                Ok::<_, ItemsError>(())
            })?;
        }
        Ok((found, items.end()?))
    }

    #[test]
    fn braces_in_strings_and_nested_items_do_not_confuse_it() {
        let items = vec![
            json!({"a": "}]\\\"{[", "items": [{"b": 1}], "metadata": {"c": []}}),
            json!({}),
            json!({"metadata": {"name": "é\u{1f600}"}}),
        ];
        let list = json!({"kind": "items", "apiVersion": "v1", "metadata": {"resourceVersion": "9"}, "items": items});
        for text in [list.to_string(), format!("{list:#}\n")] {
            for piece in 1..40 {
                let (found, metadata) = split(text.as_bytes(), piece).unwrap();
                assert_eq!(found, items);
                assert_eq!(metadata, json!({"resourceVersion": "9"}));
            }
        }
    }

    #[test]
    fn a_list_without_items_is_empty() {
        for items in [r#","items":[]"#, r#","items":null"#, ""] {
            let text = format!(r#"{{"metadata":{{"resourceVersion":"1"}}{items}}}"#);
            let (found, _) = split(text.as_bytes(), 7).unwrap();
            assert_eq!(found, Vec::<Value>::new());
        }
    }

    #[test]
    fn a_list_that_was_cut_short_is_refused() {
        let text = r#"{"metadata":{"resourceVersion":"1"},"items":[{"a":1},{"b":2}]}"#;
        for length in 0..text.len() {
            assert!(split(&text.as_bytes()[..length], 5).is_err(), "{length}");
        }
        assert!(split(b"[]", 5).is_err());
        assert!(split(b"}", 5).is_err());
        assert!(split(b"{}{}", 5).is_err());
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            "[\\PC\"\\\\{}\\[\\]]{0,12}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 20, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::btree_map("items|metadata|[a-z\"]{1,3}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn it_finds_what_a_whole_reader_finds(
            items in proptest::collection::vec(proptest::collection::btree_map("[a-z]{1,4}|items", value(), 0..4), 0..6),
            other in value(),
            piece in 1usize..64,
        ) {
            let list = json!({"metadata": {"continue": "x"}, "aaa": other, "items": items, "zzz": [[{}]]});
            let (found, _) = split(list.to_string().as_bytes(), piece).unwrap();
            prop_assert_eq!(Value::from(found), list["items"].clone());
        }
    }
}
