//! Whether processes of a pod run, by its cgroup: the kernel's word, where the kubelet's list can be
//! silent about a pod that hangs.
//!
//! The kubelet makes a cgroup for each pod before its sandbox, and names it after the pod's UID:
//! `kubepods/burstable/pod<UID>` (driver `cgroupfs`), `kubepods-burstable-pod<UID>.slice` (`systemd`,
//! with `_` for `-`), either below `--cgroup-root`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use pools::binding::state::Processes;

/// How far below the top a pod's cgroup is at most: kind has two levels above the kubelet's three.
const DEPTH: u32 = 4;
/// Hierarchies of version 1 that each process is in.
const V1_HIERARCHIES: [&str; 3] = ["pids", "memory", "systemd"];
/// Cgroups below a pod's that are looked at (version 1); beyond that it counts as running.
const MAX_CGROUPS: usize = 1000;

/// The cgroup of the pod with this UID, as a path below `root`.
pub(crate) fn find(root: &Path, uid: &str) -> Option<PathBuf> {
    let names = [
        format!("pod{uid}"),
        format!("pod{}.slice", uid.replace('-', "_")),
    ];
    match root.join("cgroup.controllers").exists() {
        true => find_below(root, Path::new(""), &names, DEPTH),
        false => V1_HIERARCHIES
            .iter()
            .find_map(|top| find_below(root, Path::new(top), &names, DEPTH)),
    }
}

fn find_below(root: &Path, at: &Path, [plain, slice]: &[String; 2], depth: u32) -> Option<PathBuf> {
    let mut above_pods = Vec::new();
    for entry in fs::read_dir(root.join(at)).ok()?.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let of_pod = name.strip_suffix(slice.as_str());
        if name == plain || of_pod.is_some_and(|stem| stem.is_empty() || stem.ends_with('-')) {
            return Some(at.join(name));
        }
        let is_above = name.starts_with("kube") || ["burstable", "besteffort"].contains(&name);
        if is_above && !name.contains("-pod") {
            above_pods.push(at.join(name));
        }
    }
    let names = [plain.clone(), slice.clone()];
    let mut above_pods = above_pods.iter().filter(|_| depth > 0);
    above_pods.find_map(|at| find_below(root, at, &names, depth - 1))
}

/// The processes of a pod's cgroup. One that was found and is gone had its last process.
pub(crate) fn processes(root: &Path, cgroup: &Path) -> Processes {
    let path = root.join(cgroup);
    hca::host::show(&path);
    let events = fs::read_to_string(path.join("cgroup.events"));
    let has_ended = match events {
        Ok(events) => Ok(events.lines().any(|line| line == "populated 0")),
        Err(error) if is_gone(&error) && path.exists() => is_empty(&path),
        Err(error) => Err(error),
    };
    match has_ended {
        Ok(true) => Processes::Ended,
        Ok(false) => Processes::Running,
        Err(error) if is_gone(&error) => Processes::Ended,
        Err(_) => Processes::Unknown,
    }
}

/// A cgroup that is removed while it is read gives ENODEV.
fn is_gone(error: &io::Error) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw);
    matches!(code, Some(Errno::ENOENT | Errno::ENODEV))
}

/// Whether no process is in a cgroup of version 1, nor in one below it.
fn is_empty(path: &Path) -> io::Result<bool> {
    let mut left = vec![path.to_owned()];
    for _ in 0..MAX_CGROUPS {
        let Some(path) = left.pop() else {
            return Ok(true);
        };
        let read = || -> io::Result<(bool, Vec<PathBuf>)> {
            let is_empty = fs::read_to_string(path.join("cgroup.procs"))?.is_empty();
            let entries = fs::read_dir(&path)?.flatten();
            let below = entries.filter(|one| one.file_type().is_ok_and(|kind| kind.is_dir()));
            Ok((is_empty, below.map(|one| one.path()).collect()))
        };
        match read() {
            Ok((true, below)) => left.extend(below),
            Ok((false, _)) => return Ok(false),
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// The UID of the pod that a process is in, by its `/proc/PID/cgroup`.
pub(crate) fn pod_uid(cgroup: &str) -> Option<String> {
    let mut components = cgroup.split(['/', '\n']);
    components.find_map(|component| {
        let name = component.strip_suffix(".slice").unwrap_or(component);
        let (stem, uid) = name.rsplit_once("pod")?;
        let is_uid = uid.len() >= 32
            && uid
                .bytes()
                .all(|byte| byte.is_ascii_hexdigit() || b"-_".contains(&byte));
        let is_pod = stem.is_empty() || stem.ends_with('-');
        (is_uid && is_pod).then(|| uid.replace('_', "-"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0a5f8e1c-6b0d-4a3e-9f2d-1c2b3a4d5e6f";

    fn made(paths: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for path in paths {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        dir
    }

    #[test]
    fn a_pods_cgroup_is_found_by_uid_for_both_drivers_and_versions() {
        let slice = "0a5f8e1c_6b0d_4a3e_9f2d_1c2b3a4d5e6f.slice";
        for path in [
            format!("kubepods/pod{UID}"),
            format!("kubepods/burstable/pod{UID}"),
            format!("kubepods.slice/kubepods-pod{slice}"),
            format!("kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{slice}"),
            format!(
                "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/\
                 kubelet-kubepods-burstable-pod{slice}"
            ),
        ] {
            let dir = made(&[&path, "kubepods.slice/kubepods-pod1.slice", "system.slice"]);
            let root = dir.path();
            assert_eq!(find(root, UID), None, "version 1 has hierarchies");
            fs::write(root.join("cgroup.controllers"), "").unwrap();
            assert_eq!(find(root, UID), Some(path.clone().into()));
            assert_eq!(find(root, "0a5f8e1c"), None);
            let v1 = made(&[&format!("memory/{path}")]);
            assert_eq!(find(v1.path(), UID), Some(Path::new("memory").join(&path)));
        }
    }

    #[test]
    fn a_pod_has_ended_when_its_cgroup_is_not_populated_or_gone() {
        let dir = made(&["p/c1/nested", "empty"]);
        let of = |cgroup: &str| processes(dir.path(), Path::new(cgroup));
        let write = |file: &str, text: &str| fs::write(dir.path().join(file), text).unwrap();
        // Version 1: processes are in the containers' cgroups.
        for cgroup in ["p", "p/c1", "p/c1/nested"] {
            write(&format!("{cgroup}/cgroup.procs"), "");
        }
        assert_eq!(of("p"), Processes::Ended);
        write("p/c1/nested/cgroup.procs", "4711\n");
        assert_eq!(of("p"), Processes::Running);
        // Version 2 says it itself.
        write("p/cgroup.events", "populated 1\nfrozen 0\n");
        assert_eq!(of("p"), Processes::Running);
        write("p/cgroup.events", "populated 0\nfrozen 0\n");
        assert_eq!(of("p"), Processes::Ended);
        assert_eq!(of("gone"), Processes::Ended);
        write("file", "");
        assert_eq!(of("file"), Processes::Unknown);
    }

    #[test]
    fn the_pod_of_a_process_is_read_from_its_cgroup() {
        let slice = UID.replace('-', "_");
        for (text, expected) in [
            (format!("0::/kubepods/burstable/pod{UID}/4f2a\n"), Some(UID)),
            (
                format!("0::/../../kubepods-pod{slice}.slice/cri-containerd-4f2a.scope\n"),
                Some(UID),
            ),
            (
                format!("12:pids:/kubepods/pod{UID}/4f2a\n0::/x\n"),
                Some(UID),
            ),
            ("0::/system.slice/opensm.service\n".into(), None),
            ("0::/system.slice/podman-1234.scope\n".into(), None),
            (String::new(), None),
        ] {
            assert_eq!(pod_uid(&text).as_deref(), expected, "{text}");
        }
    }
}
