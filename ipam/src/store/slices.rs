//! Which part of a range a node has, when `node_slice_size` cuts it.
//!
//! ```text
//! slices/<space>/<range>/<number>@<length>   the node's name; linked, so exclusive
//! slices/<space>/<range>/node:<name>         the same file
//! ```
//! The lowest number that is free goes to the node that asks first. A node that
//! is killed between the two links finds its number again by reading them all.
//! A slice stays the node's until an operator releases it: its pods may live on.

use super::dir::{Dir, Found};
use super::hint::random64;
use super::{Store, StoreError, name};
use crate::slice;
use ipnetwork::IpNetwork;

/// Longer than any node name.
const MAX_BYTES: u64 = 256;

impl Store {
    /// This node's slice of a range, taken if it has none yet.
    ///
    /// # Errors
    /// [`StoreError::NoSlice`] when other nodes have all of them,
    /// [`StoreError::SliceSize`] when the range is cut otherwise.
    pub fn slice(
        &self,
        network_name: Option<&str>,
        subnet: IpNetwork,
        length: u8,
    ) -> Result<IpNetwork, StoreError> {
        let [space, range] = place(network_name, subnet);
        let dir = self.make_below(&["slices", &space, &range])?;
        let number = match self.slice_by_node(&dir, subnet, length)? {
            Some(number) => number,
            None => self.take_slice(&dir, subnet, length)?,
        };
        slice::nth(subnet, length, number).ok_or_else(|| self.no_slice(subnet, length))
    }

    /// The slice that this node has or would take. Takes none.
    ///
    /// # Errors
    /// As [`Store::slice`].
    pub fn slice_to_come(
        &self,
        network_name: Option<&str>,
        subnet: IpNetwork,
        length: u8,
    ) -> Result<IpNetwork, StoreError> {
        let [space, range] = place(network_name, subnet);
        let number = match self.open_below(&["slices", &space, &range])? {
            None => Some(0),
            Some(dir) => {
                let taken = taken(&dir, &dir.names()?)?;
                refuse_other_size(&taken, subnet, length)?;
                let mine = taken.iter().find(|taken| taken.node == self.node.name);
                mine.map(|mine| mine.number)
                    .or_else(|| lowest_free(&taken, subnet, length))
            }
        };
        let slice = number.and_then(|number| slice::nth(subnet, length, number));
        slice.ok_or_else(|| self.no_slice(subnet, length))
    }

    /// Gives up a node's slices; answers their names.
    ///
    /// # Errors
    /// When the store cannot be read or written.
    pub fn release_slices(&self, node: &str) -> Result<Vec<String>, StoreError> {
        let mut released = Vec::new();
        let Some(slices) = self.open_below(&["slices"])? else {
            return Ok(released);
        };
        for space in slices.names()? {
            let Some(ranges) = slices.open(&space)? else {
                continue;
            };
            for range in ranges.names()? {
                let Some(dir) = ranges.open(&range)? else {
                    continue;
                };
                for taken in taken(&dir, &dir.names()?)? {
                    if taken.node == node {
                        dir.unlink(&taken.name)?;
                        released.push(format!("{range} number {}", taken.number));
                    }
                }
                dir.unlink(&by_node(node))?;
            }
        }
        Ok(released)
    }

    fn slice_by_node(
        &self,
        dir: &Dir,
        subnet: IpNetwork,
        length: u8,
    ) -> Result<Option<u128>, StoreError> {
        let Some(mine) = dir.meta(&by_node(&self.node.name))? else {
            return Ok(None);
        };
        for taken in taken(dir, &dir.names()?)? {
            if dir
                .meta(&taken.name)?
                .is_some_and(|there| there.same_file(&mine))
            {
                if taken.length != length {
                    return Err(size_mismatch(subnet, taken.length, length));
                }
                return Ok(Some(taken.number));
            }
        }
        // The operator released it while we looked, or half of it.
        dir.unlink_same(&by_node(&self.node.name), &mine)?;
        Ok(None)
    }

    fn take_slice(&self, dir: &Dir, subnet: IpNetwork, length: u8) -> Result<u128, StoreError> {
        let draft = format!(".{:016x}", random64());
        let text = format!("{}\n", self.node.name);
        if dir
            .create(&draft, text.as_bytes(), self.durable())?
            .is_none()
        {
            return Err(self.no_slice(subnet, length));
        }
        let number = self.link_slice(dir, &draft, subnet, length);
        dir.unlink(&draft)?;
        number
    }

    fn link_slice(
        &self,
        dir: &Dir,
        draft: &str,
        subnet: IpNetwork,
        length: u8,
    ) -> Result<u128, StoreError> {
        loop {
            let taken = taken(dir, &dir.names()?)?;
            refuse_other_size(&taken, subnet, length)?;
            // Ours already, if we were killed before the second link.
            let mine = taken.iter().find(|taken| taken.node == self.node.name);
            if let Some(mine) = mine {
                dir.link(&mine.name, dir, &by_node(&self.node.name))?;
                return Ok(mine.number);
            }
            let Some(number) = lowest_free(&taken, subnet, length) else {
                return Err(self.no_slice(subnet, length));
            };
            let name = format!("{number}@{length}");
            if !dir.link(draft, dir, &name)? {
                continue;
            }
            if dir.link(draft, dir, &by_node(&self.node.name))? {
                return Ok(number);
            }
            // Another call on this node was faster; its slice is the node's.
            dir.unlink(&name)?;
        }
    }

    fn no_slice(&self, subnet: IpNetwork, length: u8) -> StoreError {
        StoreError::NoSlice {
            node: self.node.name.clone(),
            range: subnet.to_string(),
            count: slice::count(subnet, length),
        }
    }
}

/// A slice that some node has.
struct Taken {
    name: String,
    number: u128,
    length: u8,
    node: String,
}

fn taken(dir: &Dir, names: &[String]) -> Result<Vec<Taken>, StoreError> {
    let mut all = Vec::new();
    for name in names {
        let Some((number, length)) = name.split_once('@') else {
            continue;
        };
        let (Ok(number), Ok(length)) = (number.parse(), length.parse()) else {
            continue;
        };
        // What cannot be read is somebody's all the same.
        let node = match dir.read(name, MAX_BYTES)? {
            None => continue,
            Some(Found::File(text, _)) => String::from_utf8_lossy(&text).trim().to_owned(),
            Some(Found::Foreign(_) | Found::TooLarge(_)) => String::new(),
        };
        all.push(Taken {
            name: name.clone(),
            number,
            length,
            node,
        });
    }
    Ok(all)
}

fn place(network_name: Option<&str>, subnet: IpNetwork) -> [String; 2] {
    [
        name::space(network_name),
        subnet.to_string().replace('/', "-"),
    ]
}

fn lowest_free(taken: &[Taken], subnet: IpNetwork, length: u8) -> Option<u128> {
    (0..slice::count(subnet, length)).find(|number| !taken.iter().any(|t| t.number == *number))
}

fn refuse_other_size(taken: &[Taken], subnet: IpNetwork, length: u8) -> Result<(), StoreError> {
    match taken.iter().find(|taken| taken.length != length) {
        Some(other) => Err(size_mismatch(subnet, other.length, length)),
        None => Ok(()),
    }
}

fn by_node(node: &str) -> String {
    format!("node:{node}")
}

fn size_mismatch(subnet: IpNetwork, found: u8, wanted: u8) -> StoreError {
    StoreError::SliceSize {
        range: subnet.to_string(),
        found: found.to_string(),
        wanted,
    }
}
