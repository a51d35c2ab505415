//! The file store: a directory of leases, on this machine or shared by many.
//!
//! An address has one holder in its space, whoever else uses the store and wherever any process is
//! killed. No lock is held, ever. `tests/explore.rs` runs this code in every order of steps in which
//! calls can meet, killed at each; change a step there first.
//!
//! # Lease entries and records
//! Each address that was ever leased has a lease entry in its shard. Its name says how many times the
//! address was leased, and whether it is leased now: `10.0.0.5@3` is held for the third time,
//! `10.0.0.5~3.1763600000000` was freed after that (`name` has the whole layout). An owner's record
//! (`owners/...:0`, `:1`, ...) names all addresses of an order with their numbers, and is written
//! once. A held lease entry is a further name (hard link) of the record's file, so the record leads to
//! its leases and each lease to its record. Freeing is one rename. A record may name leases that it
//! does not hold: whoever frees or answers compares the files (`owner::is_entry_of`).
//!
//! # ADD (`allocate`, [`claim`])
//! 1. Choose addresses by a listing, each by one number more than it shows. The listing may be old.
//! 2. Create the record under the owner's name, exclusively.
//! 3. Link the open file to each lease name. The file system lets one contender have a name.
//! 4. Confirm. If the owner's name is not this file any longer, or a name of the file is missing, or
//!    the record below is gone, a DEL overtook this ADD: withdraw all. List each shard again: if the
//!    address has another held entry, or a freed one of this number or a higher one, withdraw it.
//! 5. Remove the freed entries of lower numbers. Link the record under the pod's name, a mere hint.
//! 6. Choose anew what was lost, for a further record of the owner.
//!
//! A listing shows each name that is there all the time. Of two that claim an address, one links and
//! lists later, so it sees the other and withdraws, unless the other has begun to withdraw or to free
//! the address. Both may withdraw; each then tries again. Withdrawing is freeing at time 0, so a
//! number is not used twice. Only who chose by an old listing claims a lower number than another, and
//! step 4 makes it withdraw.
//!
//! A repeated ADD answers what the records hold: it lists again, because the first one may have been
//! killed before step 4. It removes no record, also not one that holds nothing: of two calls that
//! meet, one may otherwise remove a name that the other has made anew. Leases of an earlier boot or
//! of another network namespace are freed first, and their addresses preferred.
//!
//! # DEL ([`release`])
//! 1. For each record of the owner, last first: rename each lease entry that is this file.
//! 2. Remove the record, unless there is a further one above it.
//! 3. Look at the lease entries once more, and for a further record: an ADD that confirmed before
//!    step 2 linked them before it. Release those too.
//!
//! Step 4 of ADD reads the owner's name after its links, DEL reads the lease entries after it removed
//! the name: one of the two sees the other. The file system may give the record's inode number to
//! another record as soon as it is removed, and a lease name that was never linked to that record. So
//! after step 2, and for a record without all its names, the content decides whose an entry is.
//!
//! Release by hand, the takeover from a pod's previous sandbox and fsck free by the same rename, and
//! remove the record once it holds nothing. If an ADD linked or made a further record meanwhile, they
//! give the name back.
//!
//! # What a kill leaves
//! Killed anywhere, a call leaves a record that leads the owner's next ADD or DEL to what was begun.
//! Only if the killed call had met another one of the same owner, or three of them met, a lease may be
//! out of the owner's reach: reclaim or fsck finds it. Even then no address has two holders.
//!
//! # What the explorer does not show
//! - Loss of power. On a shared file system records and links are synced before the answer, and
//!   releases before the next step. On a file system of this machine alone nothing is synced: what a
//!   crash loses has ended with its pod; a record that it emptied is kept for taken until
//!   [`crate::reclaim`] sees that it is older than this boot.
//! - Old attributes on NFS. A node's own calls see each other's changes. Step 4 counts the file's names
//!   as well, because the answer to a link brings that count from the server.
//! - Clocks. Times only decide how long an address cools down.
//! - Hostile files. Nothing is followed (`dir`); whatever has a held lease name keeps the address
//!   taken; whatever is not a record of the store's owner is passed over and shown by fsck.

mod allocate;
mod claim;
mod dir;
mod error;
mod format;
mod fsck;
mod granted;
mod hint;
mod memory;
mod name;
mod owner;
mod pools;
mod previous;
pub(crate) mod probe;
mod release;
mod scan;
mod shard;
mod take;

pub use allocate::Want;
pub use dir::DirError;
pub use error::StoreError;
pub use fsck::{Checkup, MIN_AGE as FSCK_MIN_AGE, Problem};
pub use granted::{BlockStamp, BlockUse, Need, NodeBlock, Outside};
pub(crate) use name::{network_name as network_name_of, space as space_directory};
pub use owner::Owned;
pub use pools::Pool;
pub use release::CoolDown;
pub use scan::{Entry, Finding};
pub use take::{Order, Part, Refused, Space};

use crate::grants;
use dir::Dir;
use format::Format;
use fsck::server_time;
use granted::BlockFiles;
use memory::Memory;
use nix::errno::Errno;
use node::identity::NodeIdentity;
use node::policy::{DEFAULT_STORE_DIRECTORY, Policy, StoreKind};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

/// A store that is open.
#[derive(Debug)]
pub struct Store {
    root: Dir,
    /// Directories below it that are open, by path.
    dirs: RefCell<BTreeMap<String, Rc<Dir>>>,
    id: String,
    file_system: probe::FileSystem,
    node: NodeIdentity,
    /// Previous names of this machine in this boot.
    previous_names: Vec<String>,
    cooldown: Duration,
    /// Where the cluster gives blocks of addresses to nodes.
    blocks: Option<BlockFiles>,
    /// What the administrator should hear although it works.
    warnings: Vec<String>,
}

impl Store {
    /// Opens a store of the policy and makes sure that it is the one this node
    /// knows, on a file system that was probed in this boot. An empty directory is
    /// made a store, unless the policy or this node knows another one there.
    /// `root` is the prefix of `/proc`.
    ///
    /// # Errors
    /// [`StoreError`]: not in the policy, not reachable, not a store, another one.
    pub fn open(
        policy: &Policy,
        name: &str,
        node: NodeIdentity,
        root: &Path,
    ) -> Result<Self, StoreError> {
        let place = StorePath::of(policy, name)?;
        place.make_if_built_in()?;
        let dir = Dir::open_path(place.directory)?;
        trust(&dir)?;
        let path = memory::path(&policy.state_dir, name);
        let remembered = place.remembered(&path, place.id().is_some())?;
        let file_system = match &remembered {
            Some(memory) if memory.knows(&node) => probe::known(&dir, &memory.filesystem)?,
            _ => probe::file_system(&dir, root)?,
        };
        place.check_shared(&file_system)?;
        let expected = place.expected(remembered.as_ref());
        let format = match Format::read(&dir)? {
            Some(format) => format,
            None => {
                memory::check(&dir, expected, "no store", &file_system.name)?;
                probe::try_out(&dir)?;
                Format::establish(&dir, None)?
            }
        };
        memory::check(&dir, expected, &format.id, &file_system.name)?;
        let mut warnings = Vec::new();
        // One of another directory keeps what is in it: its leases may still be held.
        let mut memory = match remembered {
            Some(memory) => memory,
            None => Memory::read(&path).ok().flatten().unwrap_or_default(),
        };
        if !memory.knows(&node) || memory.id != format.id || memory.directory != place.directory {
            probe::try_out(&dir)?;
            warnings.extend(file_system.warning.clone());
            warnings.extend(skew(server_time(&dir)?, jiff::Timestamp::now().as_second()));
            memory.note(place.directory, &format.id, &file_system.name, &node);
            match memory.write(&path) {
                Ok(()) => {}
                // Without it this store cannot be distinguished from a directory in
                // which the share is not mounted.
                Err(source) if file_system.shared => {
                    return Err(StoreError::Remember { path, source });
                }
                Err(error) => {
                    warnings.push(format!("remember the store in {}: {error}", path.display()));
                }
            }
        }
        Ok(Self {
            blocks: place.block_files(policy, name),
            warnings,
            ..Self::with(policy, dir, format, file_system, node, memory)
        })
    }

    /// Opens a store of the policy if it is there; writes nothing, probes nothing.
    ///
    /// # Errors
    /// When there may be one that cannot be reached, or it is another one.
    pub fn open_existing(
        policy: &Policy,
        name: &str,
        node: NodeIdentity,
    ) -> Result<Option<Self>, StoreError> {
        let place = StorePath::of(policy, name)?;
        let path = memory::path(&policy.state_dir, name);
        // A store that is there is used whatever this node noted: freeing by inode
        // cannot free what is another's. One that is not may have been forgotten.
        let remembered = place.remembered(&path, true)?;
        let missing = || place.remembered(&path, false).map(|_| None);
        let expected = place.expected(remembered.as_ref());
        let dir = match Dir::open_path(place.directory) {
            Err(error) if error.source == Errno::ENOENT && remembered.is_none() => {
                return missing();
            }
            other => other?,
        };
        trust(&dir)?;
        let memory = remembered.clone().unwrap_or_default();
        let file_system = probe::known(&dir, &memory.filesystem)?;
        if let Err(error) = place.check_shared(&file_system) {
            // A node that never had the share has nothing in it.
            return match remembered {
                None => missing(),
                Some(_) => Err(error),
            };
        }
        let Some(format) = Format::read(&dir)? else {
            memory::check(&dir, expected, "no store", "its file system")?;
            return missing();
        };
        memory::check(&dir, expected, &format.id, "its file system")?;
        Ok(Some(Self {
            blocks: place.block_files(policy, name),
            ..Self::with(policy, dir, format, file_system, node, memory)
        }))
    }

    /// The store that this node used last under a name of the policy, if the policy does not name it
    /// there now, or at all, and the one before it: each, or why it cannot be opened.
    #[must_use]
    pub fn open_remembered(
        policy: &Policy,
        name: &str,
        node: &NodeIdentity,
    ) -> Vec<Result<Self, StoreError>> {
        let current = StorePath::of(policy, name)
            .ok()
            .map(|place| place.directory);
        // Whoever can write a network chooses the name, which must not lead to another file.
        if !node::identity::is_name(name) {
            return Vec::new();
        }
        let Ok(Some(memory)) = Memory::read(&memory::path(&policy.state_dir, name)) else {
            return Vec::new();
        };
        let last = memory::Known {
            id: memory.id.clone(),
            directory: memory.directory.clone(),
        };
        let stores = [Some(last), memory.previous.clone()].into_iter().flatten();
        let stores = stores.filter(|known| current != Some(known.directory.as_path()));
        let open = |known: memory::Known| {
            let dir = Dir::open_path(&known.directory)?;
            trust(&dir)?;
            let file_system = probe::known(&dir, &memory.filesystem)?;
            let found = Format::read(&dir)?;
            let id = found.as_ref().map_or("no store", |format| &format.id);
            memory::check(&dir, Some(&known.id), id, &file_system.name)?;
            let format = found.ok_or_else(|| StoreError::Format {
                path: known.directory.clone(),
                why: "it is not a store".to_owned(),
            })?;
            let (node, memory) = (node.clone(), memory.clone());
            Ok(Self::with(policy, dir, format, file_system, node, memory))
        };
        stores.map(open).collect()
    }

    /// Makes the policy's directory a store, by the identity that the policy names
    /// or a new one. The one way to make a store whose `id` the policy names.
    ///
    /// # Errors
    /// [`StoreError`]; a directory that is missing is not made.
    pub fn init(
        policy: &Policy,
        name: &str,
        node: NodeIdentity,
        root: &Path,
    ) -> Result<Self, StoreError> {
        let place = StorePath::of(policy, name)?;
        place.make_if_built_in()?;
        let dir = Dir::open_path(place.directory)?;
        trust(&dir)?;
        let file_system = probe::file_system(&dir, root)?;
        place.check_shared(&file_system)?;
        let path = memory::path(&policy.state_dir, name);
        let remembered = place.remembered(&path, place.id().is_some())?;
        if Format::read(&dir)?.is_none() {
            let known = remembered.map(|memory| memory.id);
            let other = known.filter(|known| place.id().is_none_or(|id| id != known));
            memory::check(&dir, other.as_deref(), "no store", &file_system.name)?;
            probe::try_out(&dir)?;
            Format::establish(&dir, place.id())?;
        }
        Self::open(policy, name, node, root)
    }

    fn with(
        policy: &Policy,
        root: Dir,
        format: Format,
        file_system: probe::FileSystem,
        node: NodeIdentity,
        memory: Memory,
    ) -> Self {
        let mut previous_names = if memory.boot == node.boot {
            memory.nodes
        } else {
            Vec::new()
        };
        previous_names
            .retain(|previous| *previous != node.name && node::identity::is_name(previous));
        let cooldown = policy.ipam.cooldown;
        Self {
            root,
            dirs: RefCell::default(),
            id: format.id,
            file_system,
            node,
            previous_names,
            cooldown,
            blocks: None,
            warnings: Vec::new(),
        }
    }

    /// Forgets which store this node knew in the policy's directory.
    ///
    /// # Errors
    /// When there is no such store, or the memory cannot be removed.
    pub fn forget(policy: &Policy, name: &str) -> Result<(), StoreError> {
        StorePath::of(policy, name)?;
        let path = memory::path(&policy.state_dir, name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                let source = nix::errno::Errno::from_raw(error.raw_os_error().unwrap_or(5));
                Err(dir::DirError {
                    attempt: "remove",
                    path,
                    source,
                }
                .into())
            }
            _ => Ok(()),
        }
    }

    /// Probes the file system, whatever is remembered.
    ///
    /// # Errors
    /// [`StoreError::Unfit`], or what kept it from being tried.
    pub fn probe(&self) -> Result<(), StoreError> {
        probe::try_out(&self.root)
    }

    /// Whether what was probed in this boot is still mounted for writing. Writes nothing.
    ///
    /// # Errors
    /// [`StoreError::Unfit`], or what kept it from being read.
    pub fn check_writable(&self) -> Result<(), StoreError> {
        let flags = self.root.file_system()?.flags();
        match flags.contains(nix::sys::statvfs::FsFlags::ST_RDONLY) {
            true => Err(StoreError::Unfit {
                path: self.root.path().to_owned(),
                why: probe::READ_ONLY.to_owned(),
            }),
            false => Ok(()),
        }
    }

    #[must_use]
    pub fn directory(&self) -> &Path {
        self.root.path()
    }

    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The kind of file system.
    #[must_use]
    pub fn file_system(&self) -> &str {
        &self.file_system.name
    }

    #[must_use]
    pub fn node(&self) -> &NodeIdentity {
        &self.node
    }

    /// What the administrator should hear although it works.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Whether other machines see the file system.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.file_system.shared
    }

    /// As if other machines saw the file system.
    #[cfg(test)]
    pub(crate) fn into_shared(mut self) -> Self {
        self.file_system.shared = true;
        self
    }

    fn durable(&self) -> bool {
        self.file_system.shared
    }
}

/// Where the policy says that a store is.
struct StorePath<'p> {
    directory: &'p Path,
    kind: &'p StoreKind,
}

impl<'p> StorePath<'p> {
    fn of(policy: &'p Policy, name: &str) -> Result<Self, StoreError> {
        match policy.stores.get(name) {
            Some(store) => Ok(Self {
                directory: &store.directory,
                kind: &store.kind,
            }),
            None => Err(StoreError::unknown(policy, name)),
        }
    }

    /// The store's identity, where the policy names it.
    fn id(&self) -> Option<&'p str> {
        match self.kind {
            StoreKind::File { id, .. } => id.as_deref(),
            StoreKind::Kubernetes { .. } => None,
        }
    }

    fn block_files(&self, policy: &Policy, name: &str) -> Option<BlockFiles> {
        match self.kind {
            StoreKind::File { .. } => None,
            StoreKind::Kubernetes {
                static_networks, ..
            } => Some(BlockFiles {
                static_networks: static_networks.clone(),
                store: name.to_owned(),
                directory: grants::directory(&policy.state_dir, name),
            }),
        }
    }

    /// Makes the built-in directory, which is not a mount point.
    fn make_if_built_in(&self) -> Result<(), DirError> {
        let built_in = self.directory == Path::new(DEFAULT_STORE_DIRECTORY);
        match built_in && !self.directory.exists() {
            true => make(self.directory),
            false => Ok(()),
        }
    }

    /// What this node noted of the store in this directory. With `lenient`, a note
    /// that cannot be read is none.
    fn remembered(&self, path: &Path, lenient: bool) -> Result<Option<Memory>, StoreError> {
        match Memory::read(path) {
            Ok(memory) => Ok(memory.filter(|memory| memory.directory == self.directory)),
            Err(_) if lenient => Ok(None),
            Err(why) => Err(StoreError::Forgotten {
                path: path.to_owned(),
                why,
            }),
        }
    }

    fn expected<'m>(&'m self, remembered: Option<&'m Memory>) -> Option<&'m str> {
        self.id().or(remembered.map(|memory| memory.id.as_str()))
    }

    fn check_shared(&self, file_system: &probe::FileSystem) -> Result<(), StoreError> {
        match (self.kind, file_system.shared) {
            (StoreKind::File { shared: true, .. }, false) => Err(StoreError::NotShared {
                directory: self.directory.to_owned(),
                found: file_system.name.clone(),
            }),
            // Others' leases would be in it, too.
            (StoreKind::Kubernetes { .. }, true) => Err(StoreError::Unfit {
                path: self.directory.to_owned(),
                why: format!(
                    "a store of type kubernetes has the leases of one node, but {} is a file system of several",
                    file_system.name
                ),
            }),
            _ => Ok(()),
        }
    }
}

/// More than this between this machine's clock and the file server's, in seconds, is
/// worth a warning: nodes count an address' rest by their own clocks.
const MAX_SKEW_SECONDS: i64 = 2;

fn skew(server: i64, here: i64) -> Option<String> {
    let skew = here - server;
    (skew.abs() > MAX_SKEW_SECONDS).then(|| {
        let (by, way) = (skew.abs(), if skew > 0 { "ahead of" } else { "behind" });
        format!(
            "this node's clock is {by} s {way} the file server's: freed addresses rest by each node's own clock; synchronize them"
        )
    })
}

fn make(directory: &Path) -> Result<(), DirError> {
    use std::os::unix::fs::DirBuilderExt;
    let made = std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory);
    made.map_err(|error| DirError {
        attempt: "make store",
        path: directory.to_owned(),
        source: Errno::from_raw(error.raw_os_error().unwrap_or(5)),
    })
}

/// Others than the owner must not write where records are believed.
fn trust(dir: &Dir) -> Result<(), StoreError> {
    if dir.stat_self()?.st_mode & 0o022 == 0 {
        return Ok(());
    }
    Err(StoreError::Writable {
        path: dir.path().to_owned(),
    })
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::simulated;
