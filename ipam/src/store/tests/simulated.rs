//! The store's system calls on directories in memory, for [`super::explore`]. Real descriptors go to
//! the kernel, as in a release build.
//!
//! What file systems and NFS may do, and this does:
//! - A listing is not made in one moment. Of names that come or go meanwhile it shows any.
//! - A directory that was opened before it was listed may show what it had long ago.
//! - An inode number is given to the next file as soon as nobody has the old one.
//! - A file that is open and loses its last name has none (`ENOENT` for a further link), or, on NFS, a
//!   name that only this client knows, or is gone (`ESTALE`) if another client removed it.
//! - The answer to a request that was done may be lost; its repetition then fails.

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{FileStat, Mode, UtimensatFlags};
use nix::sys::time::TimeSpec;
use nix::unistd::UnlinkatFlags;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

/// The clock stands still, in Unix seconds.
const NOW: i64 = 1_800_000_000;
/// Calls that run at one time, and one that runs alone.
pub(super) const MOST_CALLS: usize = 4;
pub(super) const ALONE: usize = MOST_CALLS - 1;

/// A name, a path or a content, by its number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Text(u32);

#[derive(Default)]
struct Texts {
    numbers: HashMap<Rc<[u8]>, Text>,
    texts: Vec<Rc<[u8]>>,
}

thread_local! {
    static TEXTS: RefCell<Texts> = RefCell::default();
    static CALL: RefCell<Option<Running>> = const { RefCell::new(None) };
}

impl Text {
    pub(super) fn of(text: impl AsRef<[u8]>) -> Self {
        TEXTS.with_borrow_mut(|all| {
            if let Some(text) = all.numbers.get(text.as_ref()) {
                return *text;
            }
            let (bytes, text) = (
                Rc::<[u8]>::from(text.as_ref()),
                Self(u32::try_from(all.texts.len()).unwrap()),
            );
            all.texts.push(Rc::clone(&bytes));
            all.numbers.insert(bytes, text);
            text
        })
    }

    pub(super) fn bytes(self) -> Rc<[u8]> {
        TEXTS.with_borrow(|all| Rc::clone(&all.texts[self.0 as usize]))
    }

    pub(super) fn text(self) -> String {
        String::from_utf8_lossy(&self.bytes()).into_owned()
    }

    fn join(self, name: Self) -> Self {
        Self::of(format!("{}/{}", self.text(), name.text()))
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.text();
        match text.starts_with('{') {
            true => write!(f, "record {}", self.0),
            false => f.write_str(&text),
        }
    }
}

/// Whatever the store decides nothing by: its files are not there.
fn is_advice(path: Text) -> bool {
    let path = path.text();
    path.starts_with("/hints") || path.starts_with("/pools")
}

type Inode = u32;

/// What a call asks of the file system.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Request {
    OpenDir(Text, Text),
    Open(Text, Text),
    Create(Text, Text),
    Attributes(Text, Text),
    AttributesOf(Inode),
    Write(Inode, Text),
    Link(Text, Text, Text, Text),
    LinkOf(Inode, Text, Text),
    Rename(Text, Text, Text, Text),
    Unlink(Text, Text),
    MakeDir(Text, Text),
    BeginListing(Text),
    /// The end of one; whether it may be an old one.
    EndListing(Text, bool),
    Choose,
    Grants,
    SetGrants(Text),
}

/// What it answers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Reply {
    Done,
    Failed(i32),
    Opened(Inode),
    Attributes {
        inode: Inode,
        links: u32,
        content: Text,
    },
    Directory,
    Names(Vec<Text>),
    Number(u64),
}

impl Request {
    pub(super) fn changes(&self) -> bool {
        matches!(
            self,
            Self::Create(..)
                | Self::Write(..)
                | Self::Link(..)
                | Self::LinkOf(..)
                | Self::Rename(..)
                | Self::Unlink(..)
                | Self::SetGrants(_)
        )
    }

    /// What a file says is read as one with opening it: it was written once.
    pub(super) fn reads_what_was_opened_by(&self, before: &Self) -> bool {
        matches!((before, self), (Self::Open(..), Self::AttributesOf(_)))
    }

    /// Whether it concerns nobody else, so that it need not be tried at every moment.
    pub(super) fn is_private(&self) -> bool {
        match self {
            Self::Create(dir, _) | Self::Unlink(dir, _) => dir.text().is_empty(),
            Self::Choose => true,
            _ => false,
        }
    }
}

#[derive(Clone, Hash, PartialEq, Eq)]
struct Inhabitant {
    content: Text,
    /// How often each call has it open.
    open: [u8; MOST_CALLS],
    /// The client that has a name of its own for it.
    silly: Option<u8>,
    /// Whether its last name was removed by another client than those that have it open.
    is_stale: bool,
}

#[derive(Clone, Hash, PartialEq, Eq)]
struct Listing {
    dir: Text,
    /// Names that came or went since it began.
    changed: BTreeSet<Text>,
}

/// Directories and files.
#[derive(Clone)]
pub(super) struct World {
    /// By directory and name.
    names: BTreeMap<(Text, Text), Inode>,
    dirs: Dirs,
    files: BTreeMap<Inode, Inhabitant>,
    listings: [Option<Listing>; MOST_CALLS],
    /// What listings may still show, by directory.
    old: Rc<BTreeMap<Text, Vec<Text>>>,
    /// By call, whether it was shown that once.
    was_old: [bool; MOST_CALLS],
    /// By call, which NFS client it runs on; nothing where all is on a local file system.
    pub(super) clients: Option<[u8; MOST_CALLS]>,
    /// The file of the node's blocks: how often it was replaced, and what it says.
    pub(super) grants: Option<(u32, Text)>,
}

/// But for what is the same in all of an exploration.
impl Hash for World {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.names, &self.files, &self.listings).hash(state);
        (self.dirs.len(), &self.was_old, &self.grants).hash(state);
    }
}

impl World {
    pub(super) fn new(clients: Option<[u8; MOST_CALLS]>) -> Self {
        Self {
            names: BTreeMap::new(),
            dirs: Rc::default(),
            files: BTreeMap::new(),
            listings: [const { None }; MOST_CALLS],
            old: Rc::default(),
            was_old: [false; MOST_CALLS],
            clients,
            grants: None,
        }
    }

    /// The names of the directories whose path begins so, with their files' contents.
    pub(super) fn below(&self, path: &str) -> Vec<(String, Text)> {
        let below = self.names.iter();
        let below = below.filter(|((dir, _), _)| dir.text().starts_with(path));
        below
            .map(|((_, name), inode)| (name.text(), self.files[inode].content))
            .collect()
    }

    /// The files of one directory, with their contents.
    pub(super) fn files_in(&self, dir: Text) -> impl Iterator<Item = (Text, Text)> {
        let all = (dir, Text(0))..=(dir, Text(u32::MAX));
        let files = self.names.range(all);
        files.map(|((_, name), inode)| (*name, self.files[inode].content))
    }

    /// Forgets all files.
    pub(super) fn forget_files(&mut self) {
        self.names.clear();
        self.files.clear();
    }

    /// From now on, listings may be as old as this moment.
    pub(super) fn remember(&mut self) {
        let mut old: BTreeMap<Text, Vec<Text>> = BTreeMap::new();
        for dir in self.dirs.values() {
            old.insert(*dir, self.listed(*dir));
        }
        self.old = Rc::new(old);
    }

    fn listed(&self, dir: Text) -> Vec<Text> {
        let all = (dir, Text(0))..=(dir, Text(u32::MAX));
        let files = self.names.range(all.clone()).map(|((_, name), _)| *name);
        let dirs = self.dirs.range(all).map(|((_, name), _)| *name);
        files.chain(dirs).collect()
    }

    fn links(&self, inode: Inode) -> u32 {
        let names = self.names.values().filter(|of| **of == inode).count();
        let silly = self
            .files
            .get(&inode)
            .is_some_and(|file| file.silly.is_some());
        u32::try_from(names).unwrap() + u32::from(silly)
    }

    fn changed(&mut self, dir: Text, name: Text) {
        for listing in self.listings.iter_mut().flatten() {
            if listing.dir == dir {
                listing.changed.insert(name);
            }
        }
    }

    fn add(&mut self, dir: Text, name: Text, inode: Inode) {
        self.names.insert((dir, name), inode);
        self.changed(dir, name);
    }

    fn remove(&mut self, call: usize, dir: Text, name: Text) -> Option<Inode> {
        let inode = self.names.remove(&(dir, name))?;
        self.changed(dir, name);
        if self.links(inode) == 0
            && let (Some(clients), Some(file)) = (self.clients, self.files.get_mut(&inode))
        {
            let mut open = (0..MOST_CALLS)
                .filter(|other| file.open[*other] > 0)
                .peekable();
            let is_open = open.peek().is_some();
            match open.find(|other| clients[*other] == clients[call]) {
                Some(_) => file.silly = Some(clients[call]),
                None => file.is_stale = is_open,
            }
        }
        Some(inode)
    }

    /// Gives up a file that nobody has.
    fn tidy(&mut self, inode: Inode) {
        let clients = self.clients.unwrap_or_default();
        if let Some(file) = self.files.get_mut(&inode) {
            let open = |client: u8| {
                (0..MOST_CALLS).any(|call| file.open[call] > 0 && clients[call] == client)
            };
            file.silly = file.silly.filter(|client| open(*client));
            let is_open = file.open.iter().any(|open| *open > 0);
            if !is_open && self.links(inode) == 0 {
                self.files.remove(&inode);
            }
        }
    }

    pub(super) fn close(&mut self, call: usize, inode: Inode) {
        if let Some(file) = self.files.get_mut(&inode) {
            file.open[call] = file.open[call].saturating_sub(1);
        }
        self.tidy(inode);
    }

    /// Closes what a call has open that has ended.
    pub(super) fn end(&mut self, call: usize) {
        self.listings[call] = None;
        let inodes: Vec<Inode> = self.files.keys().copied().collect();
        for inode in inodes {
            self.files.get_mut(&inode).unwrap().open[call] = 0;
            self.tidy(inode);
        }
    }

    fn open(&mut self, call: usize, inode: Inode) -> Reply {
        self.files.get_mut(&inode).unwrap().open[call] += 1;
        Reply::Opened(inode)
    }

    fn attributes(&self, inode: Inode) -> Reply {
        let file = &self.files[&inode];
        match file.is_stale {
            true => Reply::Failed(Errno::ESTALE as i32),
            false => Reply::Attributes {
                inode,
                links: self.links(inode),
                content: file.content,
            },
        }
    }

    fn link(&mut self, inode: Inode, dir: Text, name: Text) -> Reply {
        if self.names.contains_key(&(dir, name)) {
            return Reply::Failed(Errno::EEXIST as i32);
        }
        if self.files[&inode].is_stale {
            return Reply::Failed(Errno::ESTALE as i32);
        }
        if self.links(inode) == 0 {
            return Reply::Failed(Errno::ENOENT as i32);
        }
        self.add(dir, name, inode);
        Reply::Done
    }

    /// The possible replies to a request, each with the directory after it. The first is the reply if
    /// nothing else happens.
    pub(super) fn answer(&self, call: usize, request: &Request) -> Vec<(Self, Reply)> {
        let mut world = self.clone();
        let missing = Reply::Failed(Errno::ENOENT as i32);
        let reply = match request {
            Request::OpenDir(dir, name) => match world.dirs.contains_key(&(*dir, *name)) {
                true => Reply::Directory,
                false => missing,
            },
            Request::Open(dir, name) => match world.names.get(&(*dir, *name)) {
                Some(inode) => world.open(call, *inode),
                None => missing,
            },
            Request::Create(dir, name) if world.names.contains_key(&(*dir, *name)) => {
                Reply::Failed(Errno::EEXIST as i32)
            }
            Request::Create(dir, name) => {
                let inode = (1..)
                    .find(|inode| !world.files.contains_key(inode))
                    .unwrap();
                let file = Inhabitant {
                    content: Text::of(""),
                    open: [0; MOST_CALLS],
                    silly: None,
                    is_stale: false,
                };
                world.files.insert(inode, file);
                world.add(*dir, *name, inode);
                world.open(call, inode)
            }
            Request::Attributes(dir, name) => match world.names.get(&(*dir, *name)) {
                // By name, only whose it is is looked at by calls that meet others.
                Some(inode) => match world.attributes(*inode) {
                    Reply::Attributes { inode, .. } if call != ALONE => Reply::Attributes {
                        inode,
                        links: 1,
                        content: Text::of(""),
                    },
                    reply => reply,
                },
                None if world.dirs.contains_key(&(*dir, *name)) => Reply::Directory,
                None => missing,
            },
            Request::AttributesOf(inode) => world.attributes(*inode),
            Request::Write(inode, content) => {
                world.files.get_mut(inode).unwrap().content = *content;
                Reply::Done
            }
            Request::Link(dir, name, to, new) => match world.names.get(&(*dir, *name)) {
                Some(inode) => world.link(*inode, *to, *new),
                None => missing,
            },
            Request::LinkOf(inode, to, new) => world.link(*inode, *to, *new),
            Request::Rename(dir, name, to, new) => match world.names.get(&(*dir, *name)) {
                Some(inode) => {
                    let inode = *inode;
                    // A name that is replaced is there all the time.
                    match world.names.insert((*to, *new), inode) {
                        Some(replaced) => world.tidy(replaced),
                        None => world.changed(*to, *new),
                    }
                    world.remove(call, *dir, *name);
                    Reply::Done
                }
                None => missing,
            },
            Request::Unlink(dir, name) => match world.remove(call, *dir, *name) {
                Some(inode) => {
                    world.tidy(inode);
                    Reply::Done
                }
                None => missing,
            },
            Request::MakeDir(dir, name) => match world.dirs.contains_key(&(*dir, *name)) {
                true => Reply::Failed(Errno::EEXIST as i32),
                false => {
                    Rc::make_mut(&mut world.dirs).insert((*dir, *name), dir.join(*name));
                    world.changed(*dir, *name);
                    Reply::Done
                }
            },
            Request::BeginListing(dir) => {
                let (dir, changed) = (*dir, BTreeSet::new());
                world.listings[call] = Some(Listing { dir, changed });
                Reply::Done
            }
            Request::EndListing(dir, may_be_old) => {
                return world.end_listing(call, *dir, *may_be_old);
            }
            Request::Choose => {
                let numbers = (0..2).map(|number| Reply::Number(2 * call as u64 + number));
                return numbers.map(|number| (world.clone(), number)).collect();
            }
            Request::Grants => match world.grants {
                Some((inode, content)) => Reply::Attributes {
                    inode,
                    links: 1,
                    content,
                },
                None => missing,
            },
            Request::SetGrants(content) => {
                let replaced = world.grants.map_or(0, |(replaced, _)| replaced);
                world.grants = Some((replaced + 1, *content));
                Reply::Done
            }
        };
        vec![(world, reply)]
    }

    fn end_listing(mut self, call: usize, dir: Text, may_be_old: bool) -> Vec<(Self, Reply)> {
        let there = self.listed(dir);
        let listing = self.listings[call].take().unwrap();
        let (changed, always): (Vec<Text>, Vec<Text>) = {
            let always = there
                .iter()
                .copied()
                .filter(|name| !listing.changed.contains(name));
            (listing.changed.iter().copied().collect(), always.collect())
        };
        let mut shown: Vec<Vec<Text>> = vec![there];
        for subset in 0..1u32 << changed.len() {
            let some = changed.iter().enumerate();
            let some = some
                .filter(|(bit, _)| subset & (1 << bit) != 0)
                .map(|(_, name)| *name);
            shown.push(always.iter().copied().chain(some).collect());
        }
        let old = self
            .old
            .get(&dir)
            .filter(|_| may_be_old && !self.was_old[call])
            .cloned();
        shown.extend(old.clone());
        for names in &mut shown {
            names.sort_unstable();
        }
        let first = shown.remove(0);
        shown.retain(|names| *names != first);
        shown.sort_unstable();
        shown.dedup();
        let all = std::iter::once(first).chain(shown);
        all.map(|names| {
            let mut world = self.clone();
            world.was_old[call] |= old.as_ref() == Some(&names);
            (world, Reply::Names(names))
        })
        .collect()
    }
}

/// What went wrong with a request, besides what [`World::answer`] has: it failed, or its answer was
/// lost and its repetition failed.
pub(super) fn faults(world: &World, call: usize, request: &Request) -> Vec<(World, Reply)> {
    let mut faults = Vec::new();
    if !matches!(
        request,
        Request::Choose | Request::BeginListing(_) | Request::Grants | Request::SetGrants(_)
    ) {
        let mut world = world.clone();
        if let Request::EndListing(..) = request {
            world.listings[call] = None;
        }
        faults.push((world, Reply::Failed(Errno::EIO as i32)));
    }
    if world.clients.is_some()
        && let (after, Reply::Done) = world.answer(call, request).swap_remove(0)
    {
        let error = match request {
            Request::Link(..) | Request::LinkOf(..) => Errno::EEXIST,
            Request::Rename(..) | Request::Unlink(..) => Errno::ENOENT,
            _ => return faults,
        };
        faults.push((after, Reply::Failed(error as i32)));
    }
    faults
}

/// A call that runs on this thread.
struct Running {
    call: usize,
    /// Directories that were there from the beginning, which needs no question.
    dirs: Rc<BTreeMap<(Text, Text), Text>>,
    world: Option<World>,
    history: Vec<Reply>,
    at: usize,
    closed: Vec<Inode>,
}

struct Asked(Request);

/// How far a call comes that has been answered so far.
pub(super) struct Replayed<R> {
    /// What it closed since the last answer.
    pub(super) closed: Vec<Inode>,
    /// Its end, or what it asks next.
    pub(super) next: Result<R, Request>,
}

/// The directories of a world, for [`replay`].
pub(super) type Dirs = Rc<BTreeMap<(Text, Text), Text>>;

impl World {
    pub(super) fn directories(&self) -> Dirs {
        Rc::clone(&self.dirs)
    }
}

/// Runs a call with the answers that it had, up to what it asks next.
pub(super) fn replay<R>(
    call: usize,
    dirs: &Dirs,
    history: Vec<Reply>,
    run: impl FnOnce() -> R,
) -> Replayed<R> {
    let running = Running {
        call,
        dirs: Rc::clone(dirs),
        world: None,
        history,
        at: 0,
        closed: Vec::new(),
    };
    CALL.set(Some(running));
    let end = catch_unwind(AssertUnwindSafe(run));
    let running = CALL.take().unwrap();
    assert_eq!(
        running.at,
        running.history.len(),
        "it runs otherwise than before"
    );
    let next = match end {
        Ok(end) => Ok(end),
        Err(stopped) => match stopped.downcast::<Asked>() {
            Ok(asked) => Err(asked.0),
            Err(panic) => resume_unwind(panic),
        },
    };
    Replayed {
        closed: running.closed,
        next,
    }
}

/// Runs a call alone.
pub(super) fn alone<R>(world: &mut World, run: impl FnOnce() -> R) -> R {
    let running = Running {
        call: ALONE,
        dirs: Rc::default(),
        world: Some(world.clone()),
        history: Vec::new(),
        at: 0,
        closed: Vec::new(),
    };
    CALL.set(Some(running));
    let end = run();
    *world = CALL.take().unwrap().world.unwrap();
    world.end(ALONE);
    end
}

fn ask(request: Request) -> nix::Result<Reply> {
    let reply = CALL.with_borrow_mut(|running| {
        let running = running
            .as_mut()
            .expect("a simulated directory needs a call");
        if let Some(world) = &mut running.world {
            let (after, reply) = world.answer(running.call, &request).swap_remove(0);
            *world = after;
            return Some(reply);
        }
        let reply = running.history.get(running.at).cloned();
        running.at += usize::from(reply.is_some());
        reply
    });
    match reply {
        Some(Reply::Failed(errno)) => Err(Errno::from_raw(errno)),
        Some(reply) => Ok(reply),
        // Not a panic: no hook prints it.
        None => resume_unwind(Box::new(Asked(request))),
    }
}

fn is_simulated() -> bool {
    CALL.with_borrow(|call| call.is_some())
}

/// A descriptor of a system call.
#[derive(Debug)]
pub(crate) enum Fd {
    Real(OwnedFd),
    Simulated(Handle),
}

#[derive(Debug)]
pub(crate) struct Handle {
    object: Object,
    /// Of a file, as its attributes were read last.
    content: Cell<Option<Text>>,
    /// Of a directory, whether it was opened for one listing.
    is_fresh: bool,
}

#[derive(Debug, Clone, Copy)]
enum Object {
    Dir(Text),
    File(Inode),
}

impl Handle {
    fn new(object: Object) -> Self {
        Self {
            object,
            content: Cell::new(None),
            is_fresh: false,
        }
    }

    fn dir(&self) -> Text {
        match self.object {
            Object::Dir(path) => path,
            Object::File(_) => panic!("not a directory"),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Object::File(inode) = self.object else {
            return;
        };
        CALL.with_borrow_mut(|running| match running {
            Some(Running {
                call,
                world: Some(world),
                ..
            }) => world.close(*call, inode),
            Some(running) if !std::thread::panicking() && running.at == running.history.len() => {
                running.closed.push(inode);
            }
            _ => {}
        });
    }
}

impl Fd {
    /// The directory of the store.
    pub(crate) fn root() -> Self {
        Self::Simulated(Handle::new(Object::Dir(Text::of(""))))
    }

    fn real(&self) -> &OwnedFd {
        match self {
            Self::Real(fd) => fd,
            Self::Simulated(_) => panic!("a simulated descriptor"),
        }
    }
}

impl From<OwnedFd> for Fd {
    fn from(fd: OwnedFd) -> Self {
        Self::Real(fd)
    }
}

impl From<Fd> for File {
    fn from(fd: Fd) -> Self {
        match fd {
            Fd::Real(fd) => fd.into(),
            Fd::Simulated(_) => panic!("a simulated descriptor"),
        }
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.real().as_fd()
    }
}

/// For the links of `/proc/self/fd`.
impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Real(fd) => fd.as_raw_fd(),
            Self::Simulated(handle) => match handle.object {
                Object::File(inode) => inode.cast_signed(),
                Object::Dir(_) => panic!("not a file"),
            },
        }
    }
}

fn stat_of(reply: &Reply) -> FileStat {
    thread_local! {
        static STAT: FileStat = nix::sys::stat::stat("/").unwrap();
    }
    let mut stat = STAT.with(|stat| *stat);
    (stat.st_uid, stat.st_dev) = (0, 1);
    (stat.st_mtime, stat.st_ctime) = (NOW, NOW);
    stat.st_mode = nix::libc::S_IFDIR | 0o700;
    if let Reply::Attributes {
        inode,
        links,
        content,
    } = reply
    {
        stat.st_mode = nix::libc::S_IFREG | 0o644;
        stat.st_ino = (*inode).into();
        stat.st_nlink = (*links).into();
        stat.st_size = i64::try_from(content.bytes().len()).unwrap();
    }
    stat
}

pub(crate) fn open(path: &Path, flags: OFlag, mode: Mode) -> nix::Result<Fd> {
    nix::fcntl::open(path, flags, mode).map(Fd::Real)
}

pub(crate) fn openat(at: &Fd, name: &str, flags: OFlag, mode: Mode) -> nix::Result<Fd> {
    let dir = match at {
        Fd::Real(fd) => return nix::fcntl::openat(fd, name, flags, mode).map(Fd::Real),
        Fd::Simulated(handle) => handle.dir(),
    };
    if name == "." {
        let mut handle = Handle::new(Object::Dir(dir));
        handle.is_fresh = true;
        return Ok(Fd::Simulated(handle));
    }
    let name = Text::of(name);
    if flags.contains(OFlag::O_DIRECTORY) {
        let there = CALL.with_borrow(|call| call.as_ref().unwrap().dirs.contains_key(&(dir, name)));
        if !there {
            ask(Request::OpenDir(dir, name))?;
        }
        return Ok(Fd::Simulated(Handle::new(Object::Dir(dir.join(name)))));
    }
    if is_advice(dir) {
        return Err(Errno::ENOENT);
    }
    let opened = match flags.contains(OFlag::O_CREAT) {
        true => ask(Request::Create(dir, name))?,
        false => ask(Request::Open(dir, name))?,
    };
    match opened {
        Reply::Opened(inode) => Ok(Fd::Simulated(Handle::new(Object::File(inode)))),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn fstat(fd: &Fd) -> nix::Result<FileStat> {
    let handle = match fd {
        Fd::Real(fd) => return nix::sys::stat::fstat(fd),
        Fd::Simulated(handle) => handle,
    };
    match handle.object {
        Object::Dir(_) => Ok(stat_of(&Reply::Directory)),
        Object::File(inode) => {
            let reply = ask(Request::AttributesOf(inode))?;
            if let Reply::Attributes { content, .. } = reply {
                handle.content.set(Some(content));
            }
            Ok(stat_of(&reply))
        }
    }
}

pub(crate) fn fstatat(at: &Fd, name: &str, flags: AtFlags) -> nix::Result<FileStat> {
    match at {
        Fd::Real(fd) => nix::sys::stat::fstatat(fd, name, flags),
        Fd::Simulated(handle) if is_advice(handle.dir()) => Ok(stat_of(&Reply::Attributes {
            inode: Inode::MAX,
            links: 1,
            content: Text::of(""),
        })),
        Fd::Simulated(handle) => {
            ask(Request::Attributes(handle.dir(), Text::of(name))).map(|reply| stat_of(&reply))
        }
    }
}

pub(crate) fn mkdirat(at: &Fd, name: &str, mode: Mode) -> nix::Result<()> {
    match at {
        Fd::Real(fd) => nix::sys::stat::mkdirat(fd, name, mode),
        Fd::Simulated(handle) => ask(Request::MakeDir(handle.dir(), Text::of(name))).map(drop),
    }
}

pub(crate) fn utimensat(
    at: &Fd,
    name: &str,
    atime: &TimeSpec,
    mtime: &TimeSpec,
    flag: UtimensatFlags,
) -> nix::Result<()> {
    nix::sys::stat::utimensat(at.real(), name, atime, mtime, flag)
}

pub(crate) fn read(fd: &Fd, buffer: &mut [u8]) -> nix::Result<usize> {
    match fd {
        Fd::Real(fd) => nix::unistd::read(fd, buffer),
        Fd::Simulated(handle) => {
            let content = handle
                .content
                .get()
                .expect("the length was read before")
                .bytes();
            buffer.copy_from_slice(&content);
            Ok(content.len())
        }
    }
}

pub(crate) fn write(fd: &Fd, content: &[u8]) -> nix::Result<usize> {
    match fd {
        Fd::Real(fd) => nix::unistd::write(fd, content),
        Fd::Simulated(handle) => {
            let Object::File(inode) = handle.object else {
                panic!("not a file")
            };
            ask(Request::Write(inode, Text::of(content)))?;
            Ok(content.len())
        }
    }
}

pub(crate) fn linkat(
    at: impl AsFd + Directory,
    name: &str,
    to: &Fd,
    new: &str,
    flags: AtFlags,
) -> nix::Result<()> {
    let Fd::Simulated(handle) = to else {
        return nix::unistd::linkat(at, name, to, new, flags);
    };
    let (to, new) = (handle.dir(), Text::of(new));
    let request = match (name.strip_prefix("/proc/self/fd/"), at.simulated()) {
        (Some(inode), _) => Request::LinkOf(inode.parse().unwrap(), to, new),
        (None, Some(handle)) => Request::Link(handle.dir(), Text::of(name), to, new),
        (None, None) => panic!("no simulated directory"),
    };
    ask(request).map(drop)
}

/// A directory in which a name is looked up.
pub(crate) trait Directory {
    fn simulated(&self) -> Option<&Handle>;
}

impl Directory for &Fd {
    fn simulated(&self) -> Option<&Handle> {
        match self {
            Fd::Real(_) => None,
            Fd::Simulated(handle) => Some(handle),
        }
    }
}

impl Directory for BorrowedFd<'_> {
    fn simulated(&self) -> Option<&Handle> {
        None
    }
}

pub(crate) fn renameat(at: &Fd, name: &str, to: &Fd, new: &str) -> nix::Result<()> {
    match (at, to) {
        (Fd::Simulated(at), Fd::Simulated(to)) => {
            let (name, new) = (Text::of(name), Text::of(new));
            ask(Request::Rename(at.dir(), name, to.dir(), new)).map(drop)
        }
        _ => nix::fcntl::renameat(at, name, to, new),
    }
}

pub(crate) fn unlinkat(at: &Fd, name: &str, flag: UnlinkatFlags) -> nix::Result<()> {
    match at {
        Fd::Real(fd) => nix::unistd::unlinkat(fd, name, flag),
        Fd::Simulated(handle) => ask(Request::Unlink(handle.dir(), Text::of(name))).map(drop),
    }
}

/// What is lost with the power is not simulated.
pub(crate) fn fsync(fd: &Fd) -> nix::Result<()> {
    match fd {
        Fd::Real(fd) => nix::unistd::fsync(fd),
        Fd::Simulated(_) => Ok(()),
    }
}

/// The names of a simulated directory.
pub(crate) fn names(fd: &Fd) -> Option<nix::Result<Vec<String>>> {
    let Fd::Simulated(handle) = fd else {
        return None;
    };
    let listed = ask(Request::BeginListing(handle.dir()))
        .and_then(|_| ask(Request::EndListing(handle.dir(), !handle.is_fresh)));
    Some(listed.map(|reply| match reply {
        Reply::Names(names) => names.into_iter().map(Text::text).collect(),
        other => panic!("{other:?}"),
    }))
}

pub(crate) fn random64() -> u64 {
    match is_simulated() {
        true => match ask(Request::Choose) {
            Ok(Reply::Number(number)) => number,
            other => panic!("{other:?}"),
        },
        false => node::random::random64(),
    }
}

/// A simulated call sleeps for as long as the others please.
pub(crate) fn sleep(duration: Duration) {
    if !is_simulated() {
        std::thread::sleep(duration);
    }
}

pub(crate) struct Timestamp;

impl Timestamp {
    pub(crate) fn now() -> jiff::Timestamp {
        match is_simulated() {
            true => jiff::Timestamp::from_second(NOW).unwrap(),
            false => jiff::Timestamp::now(),
        }
    }
}

/// The file of a node's blocks, if it is simulated: which file it is, and what it says.
pub(crate) fn grants() -> Option<(u32, Rc<[u8]>)> {
    if !is_simulated() {
        return None;
    }
    match ask(Request::Grants).unwrap() {
        Reply::Attributes { inode, content, .. } => Some((inode, content.bytes())),
        other => panic!("{other:?}"),
    }
}

pub(super) fn set_grants(content: &[u8]) {
    ask(Request::SetGrants(Text::of(content))).unwrap();
}
