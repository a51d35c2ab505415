//! What of a shared store outlives a loss of power: before a call says that it is done, each change
//! of names that it depends on is on the server, in the order that the next call needs.
//!
//! The store's file system is given out as NFS: `strace` writes NFS' number into the answer of
//! statfs(2). What is asserted is the order of system calls, so no server is needed.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::case;
use e2e::cni::answer;
use e2e::harness::Case;
use e2e::lease_store::{Caller, LeaseStore, network};

pub(crate) const CASES: &[Case] = &[
    case!(
        a_first_add_on_a_share_syncs_every_directory_that_it_makes,
        Strace
    ),
    case!(
        add_on_a_share_syncs_record_then_address_then_answers,
        Strace
    ),
    case!(
        del_on_a_share_syncs_the_release_before_the_record_goes,
        Strace
    ),
    case!(an_order_on_a_share_creates_and_syncs_one_record, Strace),
    case!(
        del_on_a_share_syncs_each_release_before_the_record_goes,
        Strace
    ),
    case!(
        what_a_node_notes_of_a_store_is_synced_with_its_directories,
        Strace
    ),
    case!(a_record_that_cannot_be_read_stops_no_reclaim, Strace),
];

/// statfs(2) answers `f_type` 0x6969, `include/uapi/linux/magic.h`; 8 bytes, little endian.
const AS_NFS: &str = "inject=statfs,fstatfs:poke_exit=@arg2=6969000000000000";
/// Directories whose files are hints, and those of a probe.
const ADVICE: [&str; 3] = ["/hints", "/pods", "/pools"];

/// One change of names, or a sync, by the paths of directories.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    MakeDirectory { parent: String },
    Create { directory: String, name: String },
    Link { directory: String, name: String },
    Rename { directory: String, name: String },
    Unlink { directory: String, name: String },
    Sync { path: String },
    Answer,
}

/// The steps of a call that succeeded, on a store that is given out as shared.
fn steps(store: &LeaseStore, verb: &str, caller: &Caller) -> Result<Vec<Step>> {
    steps_of(store, verb, caller, &network(&["10.0.0.0/24"]))
}

fn steps_of(
    store: &LeaseStore,
    verb: &str,
    caller: &Caller,
    config: &serde_json::Value,
) -> Result<Vec<Step>> {
    let log = tempfile::NamedTempFile::new()?;
    let wrapper = ["strace", "-f", "-qq", "-y", "-s", "256", "-e", AS_NFS, "-o"];
    let mut wrapper: Vec<String> = wrapper.map(str::to_owned).to_vec();
    wrapper.push(log.path().display().to_string());
    answer(
        &mut store.command(verb, caller, &wrapper),
        config.to_string().as_bytes(),
    )?
    .success()?;
    let text = fs::read_to_string(log.path())?;
    let steps: Vec<Step> = text.lines().filter_map(step).collect();
    let begin = text.contains("f_type=NFS_SUPER_MAGIC");
    ensure!(begin, "strace did not give the store out as NFS: {text}");
    Ok(steps)
}

/// `1234  linkat(7</a/b>, "x", 8</c>, "y", 0) = 0`.
fn step(line: &str) -> Option<Step> {
    let line = line
        .trim_start_matches(|c: char| c.is_ascii_digit())
        .trim_start();
    let (call, rest) = line.split_once('(')?;
    if call == "write" && rest.starts_with("1<") {
        return Some(Step::Answer);
    }
    let (arguments, result) = rest.rsplit_once(" = ")?;
    if result.starts_with('-') {
        return None;
    }
    // Only descriptors with a path count; each path and each text once, in their order.
    let paths: Vec<String> = pieces(arguments, '<', '>');
    let texts: Vec<String> = pieces(arguments, '"', '"');
    let (path, text) = (paths.first().cloned(), texts.first().cloned());
    match call {
        "mkdirat" => Some(Step::MakeDirectory { parent: path? }),
        "mkdir" => {
            let parent = Path::new(&text?).parent()?.display().to_string();
            Some(Step::MakeDirectory { parent })
        }
        "openat" if arguments.contains("O_EXCL") => Some(Step::Create {
            directory: path?,
            name: text?,
        }),
        "linkat" => {
            let (directory, name) = (paths.get(1)?.clone(), texts.get(1)?.clone());
            Some(Step::Link { directory, name })
        }
        "renameat" | "renameat2" => Some(Step::Rename {
            directory: path?,
            name: text?,
        }),
        "unlinkat" => Some(Step::Unlink {
            directory: path?,
            name: text?,
        }),
        "fsync" | "fdatasync" => Some(Step::Sync { path: path? }),
        _ => None,
    }
}

fn pieces(text: &str, open: char, close: char) -> Vec<String> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once(open) {
        let Some((piece, left)) = after.split_once(close) else {
            break;
        };
        pieces.push(piece.to_owned());
        rest = left;
    }
    pieces
}

fn is_advice(path: &str) -> bool {
    ADVICE.iter().any(|room| path.contains(room)) || path.contains("/probe-")
}

/// Directories of which a new name was not synced before the answer.
fn unsynced_directories(steps: &[Step]) -> BTreeSet<String> {
    let mut unsynced = BTreeSet::new();
    for step in steps {
        match step {
            Step::MakeDirectory { parent } if !is_advice(parent) => {
                unsynced.insert(parent.clone());
            }
            Step::Sync { path } => {
                unsynced.remove(path);
            }
            Step::Answer => break,
            _ => {}
        }
    }
    unsynced
}

fn position(steps: &[Step], what: &str, is: impl Fn(&Step) -> bool) -> Result<usize> {
    let found = steps.iter().position(is);
    found.with_context(|| format!("no {what} in {steps:#?}"))
}

fn caller() -> Caller {
    Caller::new("n1", "pod")
}

fn store() -> Result<LeaseStore> {
    let store = LeaseStore::new("0")?;
    store.add_node("n1")?;
    Ok(store)
}

fn a_first_add_on_a_share_syncs_every_directory_that_it_makes() -> Result<()> {
    let store = store()?;
    let steps = steps(&store, "ADD", &caller())?;
    let made = steps
        .iter()
        .filter(|step| matches!(step, Step::MakeDirectory { parent } if !is_advice(parent)));
    // owners, the node, its bucket; leases, the space, the shard; at least.
    ensure!(made.count() >= 6, "{steps:#?}");
    let unsynced = unsynced_directories(&steps);
    ensure!(unsynced.is_empty(), "not synced: {unsynced:?}: {steps:#?}");
    Ok(())
}

fn add_on_a_share_syncs_record_then_address_then_answers() -> Result<()> {
    let store = store()?;
    store.add(&Caller::new("n1", "first"), &network(&["10.0.0.0/24"]))?;
    let steps = steps(&store, "ADD", &caller())?;
    let created = |step: &Step| matches!(step, Step::Create { directory, .. } if directory.contains("/owners/"));
    let create = position(&steps, "record", created)?;
    let Step::Create {
        directory: owner,
        name,
    } = &steps[create]
    else {
        unreachable!()
    };
    let record = format!("{owner}/{name}");
    let synced = position(&steps, "sync of the record", |step| {
        *step
            == Step::Sync {
                path: record.clone(),
            }
    })?;
    let linked = |step: &Step| matches!(step, Step::Link { directory, .. } if directory.contains("/leases/"));
    let link = position(&steps, "address", linked)?;
    let Step::Link {
        directory: shard, ..
    } = &steps[link]
    else {
        unreachable!()
    };
    let answer = position(&steps, "answer", |step| *step == Step::Answer)?;
    ensure!(create < synced && synced < link, "{steps:#?}");
    for directory in [owner, shard] {
        let sync = Step::Sync {
            path: directory.clone(),
        };
        ensure!(
            steps[link..answer].contains(&sync),
            "{directory}: {steps:#?}"
        );
    }
    Ok(())
}

fn del_on_a_share_syncs_the_release_before_the_record_goes() -> Result<()> {
    let store = store()?;
    store.add(&caller(), &network(&["10.0.0.0/24"]))?;
    let steps = steps(&store, "DEL", &caller())?;
    let renamed = |step: &Step| matches!(step, Step::Rename { directory, .. } if directory.contains("/leases/"));
    let rename = position(&steps, "rename", renamed)?;
    let Step::Rename {
        directory: shard, ..
    } = &steps[rename]
    else {
        unreachable!()
    };
    let removed = |step: &Step| matches!(step, Step::Unlink { directory, .. } if directory.contains("/owners/"));
    let remove = position(&steps, "removal of the record", removed)?;
    let sync = Step::Sync {
        path: shard.clone(),
    };
    ensure!(
        rename < remove && steps[rename..remove].contains(&sync),
        "{steps:#?}"
    );
    // The record of a DEL that was done must not come back: no runtime would call DEL again.
    let Step::Unlink {
        directory: owner, ..
    } = &steps[remove]
    else {
        unreachable!()
    };
    let sync = Step::Sync {
        path: owner.clone(),
    };
    ensure!(steps[remove..].contains(&sync), "{steps:#?}");
    Ok(())
}

/// Eight addresses of eight ranges.
fn eight() -> serde_json::Value {
    let ranges: Vec<String> = (0..8).map(|n| format!("10.0.{n}.0/24")).collect();
    network(&ranges.iter().map(String::as_str).collect::<Vec<_>>())
}

/// What an order of eight costs the file server: records made, and syncs of records, of the
/// owner's directory and of shards.
fn cost_of_eight(store: &LeaseStore) -> Result<[usize; 4]> {
    store.add_node("n1")?;
    store.add(&Caller::new("n1", "first"), &eight())?;
    let caller = Caller::new("n1", "pod");
    let steps = steps_of(store, "ADD", &caller, &eight())?;
    let linked = steps.iter().rposition(
        |step| matches!(step, Step::Link { directory, .. } if directory.contains("/leases/")),
    );
    let first_sync = steps.iter().position(
        |step| matches!(step, Step::Sync { path } if path.contains("/owners/") && path.contains("pod:")),
    );
    let (linked, first_sync) = (linked.context("no link")?, first_sync.context("no sync")?);
    ensure!(first_sync < linked, "{steps:#?}");
    let count = |is: &dyn Fn(&Step) -> bool| steps.iter().filter(|step| is(step)).count();
    let record = |path: &str| path.contains("/owners/") && path.contains("pod:");
    // Counted too: directories that the first ADD of this owner's bucket made.
    let owners = |path: &str| path.contains("/owners/n1/") && !path.contains(':');
    Ok([
        count(
            &|step| matches!(step, Step::Create { directory, .. } if directory.contains("/owners/")),
        ),
        count(&|step| matches!(step, Step::Sync { path } if record(path))),
        count(&|step| matches!(step, Step::Sync { path } if owners(path))),
        count(&|step| matches!(step, Step::Sync { path } if path.contains("/leases/"))),
    ])
}

fn an_order_on_a_share_creates_and_syncs_one_record() -> Result<()> {
    let one = cost_of_eight(&LeaseStore::new("0")?)?;
    ensure!(one == [1, 1, 1, 8], "{one:?}");
    Ok(())
}

fn del_on_a_share_syncs_each_release_before_the_record_goes() -> Result<()> {
    let store = store()?;
    store.add(&caller(), &eight())?;
    let steps = steps_of(&store, "DEL", &caller(), &eight())?;
    let removed = |step: &Step| matches!(step, Step::Unlink { directory, .. } if directory.contains("/owners/"));
    let remove = position(&steps, "removal of the record", removed)?;
    let mut released = 0;
    for (at, step) in steps.iter().enumerate() {
        let Step::Rename { directory, .. } = step else {
            continue;
        };
        released += 1;
        let sync = Step::Sync {
            path: directory.clone(),
        };
        ensure!(
            at < remove && steps[at..remove].contains(&sync),
            "{steps:#?}"
        );
    }
    ensure!(released == 8, "{released} released: {steps:#?}");
    let removals = steps.iter().filter(|step| removed(step)).count();
    ensure!(removals == 1, "{removals} records removed");
    Ok(())
}

fn what_a_node_notes_of_a_store_is_synced_with_its_directories() -> Result<()> {
    let store = store()?;
    let steps = steps(&store, "ADD", &caller())?;
    let state =
        |step: &Step| matches!(step, Step::MakeDirectory { parent } if parent.contains("/state"));
    position(&steps, "state directory", state)?;
    let unsynced = unsynced_directories(&steps);
    ensure!(unsynced.is_empty(), "not synced: {unsynced:?}: {steps:#?}");
    Ok(())
}

/// A record that gives EIO: the others are reclaimed, and it is named.
fn a_record_that_cannot_be_read_stops_no_reclaim() -> Result<()> {
    let store = store()?;
    for container in ["one", "two", "three"] {
        store.add(&Caller::new("n1", container), &network(&["10.0.0.0/24"]))?;
    }
    let records = store.files("owners");
    for record in &records {
        let mut lease: serde_json::Value = serde_json::from_slice(&fs::read(record)?)?;
        lease["boot"] = "an-earlier-one".into();
        lease["created"] = "2020-01-01T00:00:00Z".into();
        fs::write(record, lease.to_string())?;
    }
    let broken = records.first().context("no record")?;
    let reclaim = || -> Result<(String, String)> {
        let mut command = std::process::Command::new("strace");
        command.args([
            "-f",
            "-qq",
            "-o",
            "/dev/null",
            "-e",
            "inject=read:error=EIO",
            "-P",
        ]);
        command.arg(broken);
        let output = store.rdmactl_below(command, "n1", &["reclaim"]).output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((text(&output.stdout), text(&output.stderr)))
    };
    reclaim()?;
    let seen = store.state("n1").join("reclaim/default");
    let mut sightings: serde_json::Value = serde_json::from_slice(&fs::read(&seen)?)?;
    for (_, at) in sightings["seen"]
        .as_object_mut()
        .context("nothing was seen")?
    {
        *at = 1.into();
    }
    fs::write(&seen, sightings.to_string())?;
    let (stdout, stderr) = reclaim()?;
    ensure!(stdout.contains("2 freed"), "{stdout}{stderr}");
    let name = broken.file_name().context("no name")?.to_string_lossy();
    ensure!(stderr.contains(&*name), "{stderr}");
    let left: Vec<String> = store.held("n1")?.into_iter().map(|(_, of)| of).collect();
    ensure!(
        left.len() == 1 && name.starts_with(&left[0]),
        "{left:?} {name}"
    );
    Ok(())
}
