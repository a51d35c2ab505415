use super::*;
use crate::journal::Netns;
use crate::part::{Part, RdmaOnly};

fn id(container: &str, ifname: &str) -> AttachmentId {
    AttachmentId {
        container_id: ContainerId::parse(container).unwrap(),
        ifname: IfName::parse(ifname).unwrap(),
    }
}

fn bytes(size: u64) -> usize {
    usize::try_from(size).unwrap()
}

fn record() -> Record {
    Record {
        version: VERSION,
        network: "rail0".into(),
        container_id: "c1".into(),
        ifname: "net1".into(),
        pod: Some("default/a".into()),
        created: 1,
        boot: "b".into(),
        netns: Netns {
            path: "/run/netns/a".into(),
            device: 4,
            inode: 5,
        },
        parts: vec![Part::RdmaOnly(RdmaOnly {
            interface: "net1".into(),
            ..RdmaOnly::default()
        })],
        ipam: None,
    }
}

fn identity() -> Identity {
    Identity {
        bus_device: Some("0000:3b:00.0".into()),
        ..Identity::default()
    }
}

fn store() -> (tempfile::TempDir, Journal, Key) {
    let dir = tempfile::tempdir().unwrap();
    let store = Journal::at(&dir.path().join("state"));
    (dir, store, Key::of("rail0", &id("c1", "net1")).unwrap())
}

#[test]
fn a_record_is_read_until_it_is_forgotten() {
    let (_dir, store, key) = store();
    assert_eq!(store.read(&key).unwrap(), None);
    assert!(store.list().unwrap().is_empty());
    store.write(&key, &record()).unwrap();
    assert_eq!(store.read(&key).unwrap(), Some(record()));
    let changed = Record {
        created: 2,
        ..record()
    };
    fs::write(store.attachments().join(".new-rail0@c1@net1"), "{\"ver").unwrap();
    store.write(&key, &changed).unwrap();
    assert_eq!(store.read(&key).unwrap(), Some(changed));
    assert_eq!(
        store.list().unwrap(),
        [(key.clone(), "rail0".into(), id("c1", "net1"))]
    );
    fs::write(store.attachments().join(".new-rail0@c1@net1"), "{\"ver").unwrap();
    store.forget(&key).unwrap();
    store.forget(&key).unwrap();
    assert_eq!(store.read(&key).unwrap(), None);
    assert_eq!(fs::read_dir(store.attachments()).unwrap().count(), 0);
}

#[test]
fn a_record_that_was_cut_off_says_that_nothing_was_done() {
    let (_dir, store, key) = store();
    store.write(&key, &record()).unwrap();
    let path = store.attachments().join(key.as_str());
    let whole = fs::read(&path).unwrap();
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        assert_eq!(store.read(&key).unwrap(), None, "{length} bytes");
    }
}

#[test]
fn a_record_is_there_whole_or_not_at_all() {
    let (_dir, store, key) = store();
    let path = store.attachments().join(key.as_str());
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut sizes = std::collections::BTreeSet::new();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                sizes.extend(fs::read(&path).ok().map(|text| text.len()));
            }
            sizes
        });
        let creators: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let made = (0..300).filter(|_| {
                        let long = Duration::from_secs(60);
                        let _lock = store.lock_attachment(&key, long).unwrap();
                        let made = store.write(&key, &record());
                        store.forget(&key).unwrap();
                        made.is_ok()
                    });
                    made.count()
                })
            })
            .collect();
        let made: usize = creators.into_iter().map(|c| c.join().unwrap()).sum();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let whole = serde_json::to_vec(&record()).unwrap().len();
        assert_eq!(made, 900);
        assert!(reader.join().unwrap().iter().all(|size| *size == whole));
    });
}

#[test]
fn a_record_too_large_to_be_read_is_not_written() {
    let (_dir, store, key) = store();
    let large = Record {
        ipam: Some(crate::journal::record::Ipam {
            kind: "static".into(),
            config: "x".repeat(bytes(MAX_RECORD_BYTES)),
            args: String::new(),
            path: Vec::new(),
        }),
        ..record()
    };
    assert_eq!(store.write(&key, &large).unwrap_err().code, Code::State);
    assert!(store.list().unwrap().is_empty());
    store.write(&key, &record()).unwrap();
    assert_eq!(store.write(&key, &large).unwrap_err().code, Code::State);
    assert_eq!(store.read(&key).unwrap(), Some(record()));
    // Somebody else's doing; half of it would read as "nothing was done".
    let path = store.attachments().join(key.as_str());
    fs::write(&path, " ".repeat(bytes(MAX_RECORD_BYTES) + 1)).unwrap();
    assert_eq!(store.read(&key).unwrap_err().code, Code::State);
}

#[test]
fn nothing_that_others_can_write_is_read() {
    use std::os::unix::fs::PermissionsExt;
    let (_dir, store, key) = store();
    let nic = identity();
    store.write(&key, &record()).unwrap();
    store.take(&nic, &key).unwrap();
    let chmod = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let record = store.attachments().join(key.as_str());
    chmod(&record, 0o620);
    assert_eq!(store.read(&key).unwrap_err().code, Code::State);
    assert_eq!(store.records().unwrap().1.len(), 1);
    chmod(&record, 0o600);
    chmod(&store.directory, 0o770);
    let again = Journal::at(&store.directory);
    assert_eq!(again.read(&key).unwrap_err().code, Code::State);
    assert_eq!(again.claimant(&nic).unwrap_err().code, Code::State);
    assert_eq!(again.list().unwrap_err().code, Code::State);
}

#[test]
fn one_unreadable_record_hides_no_other() {
    let (dir, store, key) = store();
    store.write(&key, &record()).unwrap();
    let at = |name: &str| store.attachments().join(name);
    fs::write(at("rail0@newer@net1"), r#"{"version": 99}"#).unwrap();
    fs::write(at("rail0@garbage@net1"), "no JSON").unwrap();
    fs::write(at("rail0@half@net1"), r#"{"version": 1, "netw"#).unwrap();
    fs::create_dir(at("rail0@directory@net1")).unwrap();
    let secret = dir.path().join("elsewhere");
    fs::write(&secret, serde_json::to_vec(&record()).unwrap()).unwrap();
    std::os::unix::fs::symlink(&secret, at("rail0@link@net1")).unwrap();
    nix::unistd::mkfifo(
        &at("rail0@fifo@net1"),
        nix::sys::stat::Mode::from_bits_truncate(0o600),
    )
    .unwrap();
    let (records, unreadable) = store.records().unwrap();
    assert_eq!(records, [(key, record())]);
    let errors: Vec<String> = unreadable
        .iter()
        .map(|(id, error)| format!("{} {} {:?}", id.container_id, error.code.0, error.kind))
        .collect();
    assert_eq!(
        errors,
        [
            "directory 105 Other",
            "fifo 105 Other",
            "garbage 105 Other",
            "half 105 Incomplete",
            "link 105 Other",
            "newer 105 Other",
        ]
    );
}

#[test]
fn an_attachment_is_locked_whatever_its_network() {
    let (_dir, store, key) = store();
    let other_network = Key::of("rail1", &id("c1", "net1")).unwrap();
    let other_interface = Key::of("rail0", &id("c1", "net2")).unwrap();
    let held = store.lock_attachment(&key, Duration::ZERO).unwrap();
    assert_eq!(
        store
            .lock_attachment(&other_network, Duration::from_millis(30))
            .unwrap_err()
            .kind,
        Kind::Locked
    );
    store
        .lock_attachment(&other_interface, Duration::ZERO)
        .unwrap();
    drop(held);
    store
        .lock_attachment(&other_network, Duration::ZERO)
        .unwrap();
}

#[test]
fn one_at_a_time_holds_an_attachments_lock() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let (_dir, store, key) = store();
    let (inside, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    let _held = store
                        .lock_attachment(&key, Duration::from_secs(60))
                        .unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    std::thread::yield_now();
                    inside.fetch_sub(1, Ordering::SeqCst);
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
    });
    assert_eq!(done.into_inner(), 400);
}

#[test]
fn a_state_directory_that_others_can_change_is_not_safe() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().join("above/state");
    let store = || Journal::at(&own);
    store().check_owner().unwrap();
    let key = Key::of("rail0", &id("c1", "net1")).unwrap();
    store().write(&key, &record()).unwrap();
    store().check_owner().unwrap();
    let refused = |why: &str| {
        let error = store().check_owner().unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    };
    let chmod =
        |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    for path in [own.clone(), store().attachments(), dir.path().join("above")] {
        let before = fs::metadata(&path).unwrap().permissions();
        for mode in [0o775, 0o757] {
            chmod(&path, mode);
            refused("is writable");
        }
        fs::set_permissions(&path, before).unwrap();
    }
    // No other user can replace a directory in a sticky directory.
    chmod(&dir.path().join("above"), 0o1777);
    store().check_owner().unwrap();
    chmod(&own, 0o1777);
    refused("is writable");
    chmod(&own, 0o700);
    let elsewhere = dir.path().join("elsewhere");
    fs::rename(&own, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &own).unwrap();
    refused("is a link");
    fs::remove_file(&own).unwrap();
    fs::write(&own, "").unwrap();
    refused("is not a directory");
    // Needs root; without it chown fails.
    fs::remove_file(&own).unwrap();
    fs::create_dir(&own).unwrap();
    if std::os::unix::fs::chown(&own, Some(65534), None).is_ok() {
        refused("does not belong to root");
    }
}

#[test]
fn names_read_back_in_one_way_only() {
    let odd = id("c", "a@b");
    let key = Key::of("net", &odd).unwrap();
    assert_eq!(
        Key::parse(key.as_str()),
        Some((key.clone(), "net".into(), odd))
    );
    assert_eq!(Key::parse("no-record"), None);
    assert_eq!(Key::parse(".probe-7"), None);
    assert_eq!(Key::parse(".new-rail0@c1@net1"), None);
    assert_eq!(Key::of(&"n".repeat(250), &id("c", "net1")), None);
}

#[test]
fn a_netdev_has_one_owner_at_a_time() {
    let (_dir, store, key) = store();
    let nic = identity();
    let lock = store.lock(&nic).unwrap();
    assert_eq!(store.claimant(&nic).unwrap(), None);
    store.take(&nic, &key).unwrap();
    store.take(&nic, &key).unwrap();
    assert_eq!(store.claimant(&nic).unwrap().as_ref(), Some(&key));
    let other = Identity {
        bus_device: Some("0000:3b:00.1".into()),
        ..Identity::default()
    };
    assert_eq!(store.claimant(&other).unwrap(), None);
    let next = Key::of("rail0", &id("c2", "net1")).unwrap();
    store.take(&nic, &next).unwrap();
    assert_eq!(store.claimant(&nic).unwrap(), Some(next));
    store.release(&nic).unwrap();
    assert_eq!(store.claimant(&nic).unwrap(), None, "released");
    drop(lock);
    store.lock(&nic).unwrap();
}

/// The places that the documentation names.
#[test]
fn records_claims_and_locks_are_below_the_state_directory() {
    let (dir, store, key) = store();
    assert!(!store.exists());
    let nic = identity();
    let _netdev = store.lock(&nic).unwrap();
    let _attachment = store.lock_attachment(&key, Duration::ZERO).unwrap();
    store.take(&nic, &key).unwrap();
    assert!(!store.exists(), "no attachment was recorded yet");
    store.write(&key, &record()).unwrap();
    assert!(store.exists());
    for file in [
        "attachments/rail0@c1@net1",
        &format!("devices/{}", nic.key()),
        "lock",
    ] {
        assert!(dir.path().join("state").join(file).is_file(), "{file}");
    }
}

/// A record of a size, in bytes as it is written.
fn record_of(size: u64) -> Record {
    let with = |config: String| Record {
        ipam: Some(crate::journal::record::Ipam {
            kind: "static".into(),
            config,
            args: String::new(),
            path: Vec::new(),
        }),
        ..record()
    };
    let empty = serde_json::to_vec(&with(String::new())).unwrap().len();
    with("x".repeat(bytes(size) - empty))
}

#[test]
fn a_record_of_exactly_the_most_bytes_is_written() {
    let (_dir, store, key) = store();
    let refused = store.write(&key, &record_of(MAX_RECORD_BYTES + 1));
    assert_eq!(refused.unwrap_err().code, Code::State);
    store.write(&key, &record_of(MAX_RECORD_BYTES)).unwrap();
    assert!(store.read(&key).unwrap().is_some());
}

/// Otherwise GC and reclaim would find nothing to do, and a NIC would stay in a pod.
#[test]
fn a_journal_that_cannot_be_listed_is_not_an_empty_one() {
    let (dir, _, _) = store();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let store = Journal::at(&file);
    assert_eq!(store.list().unwrap_err().code, Code::State);
    assert!(store.records().is_err());
    let below = Journal::at(&file.join("state"));
    let error = below.check_owner().unwrap_err();
    assert_eq!(error.code, Code::State, "{error}");
}

#[test]
fn an_unreadable_record_is_shown_with_its_attachment_and_what_to_do() {
    let (_dir, store, key) = store();
    store.write(&key, &record()).unwrap();
    let at = |name: &str| store.attachments().join(name);
    fs::write(at("rail0@c1@net1"), r#"{"version": 99}"#).unwrap();
    fs::write(at("rail0@c2@net1"), "").unwrap();
    let (_, unreadable) = store.records().unwrap();
    let shown: Vec<String> = unreadable.iter().map(|(_, e)| e.to_string()).collect();
    let [newer, incomplete] = shown.as_slice() else {
        panic!("{shown:?}");
    };
    assert!(
        newer.starts_with("net1 of container c1 of rail0: ") && newer.ends_with("newer before)"),
        "{newer}"
    );
    assert!(incomplete.ends_with("while it was written"), "{incomplete}");
}

#[test]
fn the_end_of_a_record_is_waited_for() {
    let (_dir, store, key) = store();
    let short = Duration::from_millis(50);
    let wait = |timeout| store.wait_for_del(&key, timeout).unwrap();
    assert!(wait(short), "no journal");
    store.write(&key, &record()).unwrap();
    let other = Key::of("rail0", &id("c2", "net1")).unwrap();
    store.write(&other, &record()).unwrap();
    assert!(!wait(short));
    // Another record's end does not end the wait.
    let long = Duration::from_secs(60);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| wait(long));
        store.forget(&other).unwrap();
        std::thread::sleep(short);
        assert!(!waiter.is_finished());
        // What DEL leaves for a repair is another record.
        store.write(&key, &record()).unwrap();
        assert!(waiter.join().unwrap());
    });
    store.forget(&key).unwrap();
    assert!(wait(Duration::ZERO));
}

/// The whole journal goes with `rdma-device-plugin uninstall`.
#[test]
fn a_journal_that_is_removed_ends_the_wait() {
    let (dir, store, key) = store();
    store.write(&key, &record()).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| store.wait_for_del(&key, Duration::from_secs(60)));
        std::thread::sleep(Duration::from_millis(20));
        std::fs::remove_dir_all(dir.path().join("state")).unwrap();
        assert!(waiter.join().unwrap().unwrap());
    });
}
