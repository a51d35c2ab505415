//! Which part of a range a node has, when `node_slice_size` cuts it.
//!
//! ```text
//! slices/<space>/<range>/node:<name>         the node's file, its name in it; linked, so exclusive
//! slices/<space>/<range>/<number>@<length>   the same file: the slice is the node's
//! slices/<space>/<range>/at:<name>           <number>@<length>, a hint
//! ```
//! The lowest number that is free and has a usable address goes to the node that
//! asks first. All calls on a node link one file, the node's, so two that are
//! first at the same time find each other's number. Which number a node has is
//! read from the hint and believed when that number is the node's file; without it
//! the numbers are compared with the file, none is read. A slice stays the node's
//! until an operator releases it: its pods may live on.

use super::dir::{Dir, Found, Meta};
use super::{Store, StoreError, name};
use crate::range::Range;
use crate::slice;
use ipnetwork::IpNetwork;
use node::random::random64;
use std::collections::BTreeSet;

/// Longer than any node name.
const MAX_BYTES: u64 = 256;
/// Node names up to this length, in bytes, are written out in names of files.
const MAX_NODE_BYTES: usize = 200;
/// How often a call starts again when an operator removes what it has just made.
const MAX_STARTS: usize = 8;

impl Store {
    /// This node's slice of a range, taken if it has none yet.
    ///
    /// # Errors
    /// [`StoreError::NoSlice`] when other nodes have all of them,
    /// [`StoreError::SliceSize`] when the range is cut otherwise.
    pub fn slice(
        &self,
        network_name: Option<&str>,
        range: &Range,
        length: u8,
    ) -> Result<IpNetwork, StoreError> {
        let subnet = range.subnet();
        let [space, place] = place(network_name, subnet);
        let dir = self.make_below(&["slices", &space, &place])?;
        let number = match self.slice_by_hint(&dir, subnet, length)? {
            Some(number) => number,
            None => self.take_slice(&dir, range, length)?,
        };
        slice::nth(subnet, length, number).ok_or_else(|| beyond(&dir, number, length))
    }

    /// The slice that this node has or would take. Takes none.
    ///
    /// # Errors
    /// As [`Store::slice`].
    pub fn slice_to_come(
        &self,
        network_name: Option<&str>,
        range: &Range,
        length: u8,
    ) -> Result<IpNetwork, StoreError> {
        let subnet = range.subnet();
        let [space, place] = place(network_name, subnet);
        let Some(dir) = self.open_below(&["slices", &space, &place])? else {
            let first = Self::first_slice(range, length);
            return first.ok_or_else(|| self.no_slice(subnet, length, 0));
        };
        let number = match self.slice_by_hint(&dir, subnet, length)? {
            Some(number) => number,
            None => {
                let names = numbers(&dir)?;
                refuse_other_size(&names, subnet, length)?;
                let mine = match dir.meta(&by_node(&self.node.name))? {
                    Some(mine) => number_of(&dir, &names, &mine)?,
                    None => None,
                };
                let taken = taken(&names);
                mine.or_else(|| lowest_free(&taken, range, length))
                    .ok_or_else(|| self.no_slice(subnet, length, taken.len()))?
            }
        };
        slice::nth(subnet, length, number).ok_or_else(|| beyond(&dir, number, length))
    }

    /// The slice that the first node takes of an unused range.
    #[must_use]
    pub fn first_slice(range: &Range, length: u8) -> Option<IpNetwork> {
        let number = lowest_free(&BTreeSet::new(), range, length)?;
        slice::nth(range.subnet(), length, number)
    }

    /// Gives up a node's slices, those of one network name and of one range if they are
    /// named; answers which they were.
    ///
    /// # Errors
    /// When the store cannot be read or written.
    pub fn release_slices(
        &self,
        node: &str,
        network_name: Option<Option<&str>>,
        range: Option<IpNetwork>,
    ) -> Result<Vec<String>, StoreError> {
        let mut released = Vec::new();
        let Some(slices) = self.open_below(&["slices"])? else {
            return Ok(released);
        };
        for space in slices.names()? {
            if network_name.is_some_and(|wanted| name::space(wanted) != space) {
                continue;
            }
            let Some(ranges) = slices.open(&space)? else {
                continue;
            };
            for name in ranges.names()? {
                let subnet = subnet_of(&name);
                if range.is_some_and(|wanted| subnet != Some(wanted)) {
                    continue;
                }
                let Some(dir) = ranges.open(&name)? else {
                    continue;
                };
                for number in numbers(&dir)? {
                    let file = number.name();
                    if let Some(Found::File(text, _)) = dir.read(&file, MAX_BYTES)?
                        && String::from_utf8_lossy(&text).trim() == node
                    {
                        dir.unlink(&file)?;
                        let slice = subnet
                            .and_then(|subnet| slice::nth(subnet, number.length, number.number));
                        released.push(match slice {
                            Some(slice) => slice.to_string(),
                            None => format!("{name} number {file}"),
                        });
                    }
                }
                dir.unlink(&by_node(node))?;
                dir.unlink(&hint_of(node))?;
            }
        }
        Ok(released)
    }

    /// The slices that nodes have: network name, range, slice and node.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn slices(&self) -> Result<Vec<Slice>, StoreError> {
        let mut all = Vec::new();
        let Some(slices) = self.open_below(&["slices"])? else {
            return Ok(all);
        };
        for space in slices.names()? {
            let (Some(network_name), Some(ranges)) =
                (name::network_name(&space), slices.open(&space)?)
            else {
                continue;
            };
            for range in ranges.names()? {
                let (Some(subnet), Some(dir)) = (subnet_of(&range), ranges.open(&range)?) else {
                    continue;
                };
                for number in numbers(&dir)? {
                    let node = match dir.read(&number.name(), MAX_BYTES)? {
                        Some(Found::File(text, _)) => {
                            String::from_utf8_lossy(&text).trim().to_owned()
                        }
                        _ => String::new(),
                    };
                    if let Some(slice) = slice::nth(subnet, number.length, number.number) {
                        all.push(Slice {
                            network_name: network_name.clone(),
                            range: subnet,
                            slice,
                            node,
                        });
                    }
                }
            }
        }
        all.sort_by(|a, b| (&a.network_name, a.slice).cmp(&(&b.network_name, b.slice)));
        Ok(all)
    }

    /// The number in the node's hint, if that number is the node's file.
    fn slice_by_hint(
        &self,
        dir: &Dir,
        subnet: IpNetwork,
        length: u8,
    ) -> Result<Option<u128>, StoreError> {
        let Some(Found::File(hint, _)) = dir.read(&hint_of(&self.node.name), MAX_BYTES)? else {
            return Ok(None);
        };
        let text = String::from_utf8_lossy(&hint);
        let Some(hint) = Number::parse(text.trim()) else {
            return Ok(None);
        };
        let (file, number) = (
            dir.meta(&by_node(&self.node.name))?,
            dir.meta(&hint.name())?,
        );
        if !file
            .zip(number)
            .is_some_and(|(file, number)| file.same_file(&number))
        {
            return Ok(None);
        }
        match hint.length == length {
            true => Ok(Some(hint.number)),
            false => Err(size_mismatch(subnet, hint.length, length)),
        }
    }

    fn take_slice(&self, dir: &Dir, range: &Range, length: u8) -> Result<u128, StoreError> {
        for _ in 0..MAX_STARTS {
            self.make_node_file(dir)?;
            if let Some(number) = self.link_slice(dir, range, length)? {
                let number = Number { number, length };
                // A hint: what cannot be written costs the next call a comparison.
                if dir.unlink(&hint_of(&self.node.name)).is_ok() {
                    let _ = dir.create(
                        &hint_of(&self.node.name),
                        format!("{}\n", number.name()).as_bytes(),
                        false,
                    );
                }
                return Ok(number.number);
            }
        }
        let file = by_node(&self.node.name);
        Err(dir.failed("keep", &file)(nix::errno::Errno::ENOENT).into())
    }

    /// Makes the node's file, unless it is there.
    fn make_node_file(&self, dir: &Dir) -> Result<(), StoreError> {
        let name = by_node(&self.node.name);
        for _ in 0..MAX_STARTS {
            if dir.meta(&name)?.is_some() {
                return Ok(());
            }
            let draft = format!(".{:016x}", random64());
            let text = format!("{}\n", self.node.name);
            if dir
                .create(&draft, text.as_bytes(), self.durable())?
                .is_some()
            {
                // Of two calls one has the name; both use what has it then.
                let linked = dir.link(&draft, dir, &name);
                dir.unlink(&draft)?;
                linked?;
            }
        }
        Err(dir.failed("keep", &name)(nix::errno::Errno::ENOENT).into())
    }

    /// Links the node's file to the lowest number that is free; none when an operator
    /// removed the file meanwhile.
    fn link_slice(&self, dir: &Dir, range: &Range, length: u8) -> Result<Option<u128>, StoreError> {
        let subnet = range.subnet();
        loop {
            // Anew each time: it counts the file's names.
            let Some(mine) = dir.meta(&by_node(&self.node.name))? else {
                return Ok(None);
            };
            let names = numbers(dir)?;
            refuse_other_size(&names, subnet, length)?;
            if let Some(number) = number_of(dir, &names, &mine)? {
                return Ok(Some(number));
            }
            let taken = taken(&names);
            let Some(number) = lowest_free(&taken, range, length) else {
                return Err(self.no_slice(subnet, length, taken.len()));
            };
            let name = Number { number, length }.name();
            match dir.link(&by_node(&self.node.name), dir, &name) {
                Ok(true) if self.durable() => dir.sync()?,
                // Taken: by another node, or by another call on this one, which the
                // next listing shows. Each turn, somebody has got a number.
                Ok(_) => {}
                Err(error) if error.source == nix::errno::Errno::ENOENT => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn no_slice(&self, subnet: IpNetwork, length: u8, taken: usize) -> StoreError {
        StoreError::NoSlice {
            node: self.node.name.clone(),
            range: subnet.to_string(),
            length,
            taken,
            count: slice::count(subnet, length),
        }
    }
}

/// A slice that a node has.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Slice {
    /// `network_name`.
    pub network_name: Option<String>,
    /// The range that is cut.
    pub range: IpNetwork,
    /// The part of it.
    pub slice: IpNetwork,
    /// Whose it is; empty where that cannot be read.
    pub node: String,
}

/// A slice's number and length, as its file is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Number {
    number: u128,
    length: u8,
}

impl Number {
    fn parse(name: &str) -> Option<Self> {
        let (number, length) = name.split_once('@')?;
        let parsed = Self {
            number: number.parse().ok()?,
            length: length.parse().ok()?,
        };
        // One spelling, or one slice would have several exclusive names.
        (parsed.name() == name).then_some(parsed)
    }

    fn name(self) -> String {
        format!("{}@{}", self.number, self.length)
    }
}

fn numbers(dir: &Dir) -> Result<Vec<Number>, StoreError> {
    let names = dir.names_that(|name| Number::parse(name).is_some())?;
    Ok(names
        .iter()
        .filter_map(|name| Number::parse(name))
        .collect())
}

fn taken(names: &[Number]) -> BTreeSet<u128> {
    names.iter().map(|name| name.number).collect()
}

/// The lowest number that is a node's file.
fn number_of(dir: &Dir, names: &[Number], file: &Meta) -> Result<Option<u128>, StoreError> {
    // A file with one name is no slice's.
    if file.links < 2 {
        return Ok(None);
    }
    let mut found = None;
    for name in names {
        if dir
            .meta(&name.name())?
            .is_some_and(|there| there.same_file(file))
        {
            found = Some(found.map_or(name.number, |known: u128| known.min(name.number)));
        }
    }
    Ok(found)
}

fn place(network_name: Option<&str>, subnet: IpNetwork) -> [String; 2] {
    [
        name::space(network_name),
        subnet.to_string().replace('/', "-"),
    ]
}

/// The range that a directory of slices is named by.
fn subnet_of(name: &str) -> Option<IpNetwork> {
    let (address, length) = name.rsplit_once('-')?;
    IpNetwork::new(address.parse().ok()?, length.parse().ok()?).ok()
}

/// The lowest number that no node has and whose slice has a usable address. Only slices in
/// which the range has addresses are tried; of these, the first and the last of a span may
/// have none that is usable.
fn lowest_free(taken: &BTreeSet<u128>, range: &Range, length: u8) -> Option<u128> {
    let subnet = range.subnet();
    let number_at = |address: u128| slice::number_of(subnet, length, address);
    let spans = range.spans().iter();
    let mut numbers = spans.flat_map(|span| number_at(span.first)..=number_at(span.last));
    numbers.find(|number| {
        let usable = |slice: IpNetwork| range.slice(slice).size() > 0;
        !taken.contains(number) && slice::nth(subnet, length, *number).is_some_and(usable)
    })
}

/// A node's file is linked to a number that the range has not.
fn beyond(dir: &Dir, number: u128, length: u8) -> StoreError {
    StoreError::Foreign {
        path: dir.path().join(Number { number, length }.name()),
        what: "a slice beyond the end of the range".to_owned(),
    }
}

fn refuse_other_size(names: &[Number], subnet: IpNetwork, length: u8) -> Result<(), StoreError> {
    match names.iter().find(|name| name.length != length) {
        Some(other) => Err(size_mismatch(subnet, other.length, length)),
        None => Ok(()),
    }
}

fn by_node(node: &str) -> String {
    format!("node:{}", short(node))
}

fn hint_of(node: &str) -> String {
    format!("at:{}", short(node))
}

/// A node's name as part of a file's: a file system takes 255 bytes.
fn short(node: &str) -> String {
    match node.get(..MAX_NODE_BYTES) {
        Some(start) if node.len() > MAX_NODE_BYTES => {
            format!("{start}+{:016x}", name::hash64(node))
        }
        _ => node.to_owned(),
    }
}

fn size_mismatch(subnet: IpNetwork, found: u8, wanted: u8) -> StoreError {
    StoreError::SliceSize {
        range: subnet.to_string(),
        found: found.to_string(),
        wanted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::range::Spec;
    use crate::store::meeting::Meeting;
    use node::identity::NodeIdentity;
    use node::policy::{Policy, Profile, Store as StorePolicy};
    use std::path::Path;

    fn open(place: &Path, node: &str) -> Store {
        std::fs::create_dir_all(place.join("store")).unwrap();
        let store = StorePolicy::file(place.join("store"));
        let mut policy = Policy {
            state_dir: place.join("state"),
            ..Policy::default()
        };
        policy.stores.insert("default".into(), store);
        let node = NodeIdentity::read(Path::new("/"), node).unwrap();
        Store::open(&policy, "default", node, Path::new("/")).unwrap()
    }

    fn range(text: &str, exclude: &[&str]) -> Range {
        let spec = Spec {
            range: text,
            exclude,
            ..Spec::default()
        };
        Range::new(&spec, Profile::Strict).unwrap()
    }

    #[test]
    fn calls_of_one_node_that_meet_share_one_slice() {
        for _ in 0..20 {
            let place = tempfile::tempdir().unwrap();
            let range = range("10.0.0.0/24", &[]);
            open(place.path(), "n0");
            let start = Meeting::of(6);
            let all = std::sync::Mutex::new(Vec::new());
            std::thread::scope(|scope| {
                for call in 0..6 {
                    let (range, start, all, place) = (&range, &start, &all, place.path());
                    scope.spawn(move || {
                        let node = format!("n{}", call % 2);
                        let store = open(place, &node);
                        start.wait(0);
                        store.slice(None, range, 26).unwrap();
                        all.lock().unwrap().push(node);
                    });
                }
            });
            let [one, two] = ["n0", "n1"].map(|node| {
                let store = open(place.path(), node);
                let first = store.slice(None, &range, 26).unwrap();
                assert_eq!(store.slice(None, &range, 26).unwrap(), first);
                assert_eq!(store.slice_to_come(None, &range, 26).unwrap(), first);
                first
            });
            assert_ne!(one, two);
            assert_eq!(all.into_inner().unwrap().len(), 6);
        }
    }

    #[test]
    fn a_wrong_hint_never_finds_a_slice() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.0.0.0/24", &[]);
        let [one, two] = ["n1", "n2"].map(|node| open(place.path(), node));
        let first = one.slice(None, &range, 26).unwrap();
        let second = two.slice(None, &range, 26).unwrap();
        let dir = place.path().join("store/slices/default/10.0.0.0-24");
        for hint in ["1@26", "7@26", "0@25", "junk", ""] {
            std::fs::write(dir.join("at:n1"), hint).unwrap();
            assert_eq!(one.slice(None, &range, 26).unwrap(), first, "{hint}");
        }
        std::fs::remove_file(dir.join("at:n2")).unwrap();
        assert_eq!(two.slice_to_come(None, &range, 26).unwrap(), second);
        assert_eq!(two.slice(None, &range, 26).unwrap(), second);
        assert!(matches!(
            one.slice(None, &range, 27),
            Err(StoreError::SliceSize { .. })
        ));
        assert_eq!(two.slices().unwrap().len(), 2);
    }

    #[test]
    fn a_slice_without_a_usable_address_is_never_taken() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path(), "n1");
        let excluded = range("10.0.0.0/24", &["10.0.0.0/26"]);
        let slice = store.slice_to_come(None, &excluded, 26).unwrap();
        assert_eq!(slice.to_string(), "10.0.0.64/26");
        assert_eq!(store.slice(None, &excluded, 26).unwrap(), slice);
        // The network's own address is none.
        let single = range("10.0.1.0/24", &[]);
        let slice = store.slice(None, &single, 32).unwrap();
        assert_eq!(slice.to_string(), "10.0.1.1/32");
        let one = range("10.0.2.0/30", &["10.0.2.1"]);
        store.slice(None, &one, 31).unwrap();
        let late = open(place.path(), "n2").slice(None, &one, 31);
        assert!(matches!(late, Err(StoreError::NoSlice { .. })), "{late:?}");
    }

    #[test]
    fn nodes_with_long_names_have_slices_of_their_own() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.0.0.0/24", &[]);
        let long = |end: &str| format!("{}{end}", "n".repeat(252));
        let [one, two] = ["1", "2"].map(|end| open(place.path(), &long(end)));
        let first = one.slice(None, &range, 26).unwrap();
        assert_ne!(two.slice(None, &range, 26).unwrap(), first);
        assert_eq!(one.slice(None, &range, 26).unwrap(), first);
        let released = two.release_slices(&long("1"), None, None).unwrap();
        assert_eq!(released.len(), 1, "{released:?}");
        assert_eq!(one.slices().unwrap()[0].node, long("2"));
    }

    #[test]
    fn slices_are_released_in_one_network_name() {
        let place = tempfile::tempdir().unwrap();
        let range = range("10.0.0.0/24", &[]);
        let store = open(place.path(), "n1");
        store.slice(None, &range, 26).unwrap();
        store.slice(Some("blue"), &range, 26).unwrap();
        assert_eq!(
            store.release_slices("n1", Some(None), None).unwrap().len(),
            1
        );
        let left = store.slices().unwrap();
        assert_eq!(left[0].network_name.as_deref(), Some("blue"));
        assert_eq!(store.release_slices("n2", None, None).unwrap().len(), 0);
        assert_eq!(store.release_slices("n1", None, None).unwrap().len(), 1);
    }
}
