//! Whether the container runtime reads CDI files, from its configuration and, where that can be read,
//! its program. The daemon asks this, too, before it delivers devices by CDI.
//!
//! containerd: on by default since 2.0, and `enable_cdi` of its CRI plugin decides; 1.7 has it off by
//! default (`docs/cri/config.md`). Only 2.0 and newer read a configuration of `version = 3` or higher
//! (`docs/containerd-2.0.md`). 1.6 knows neither CDI nor `enable_cdi`, and passes over both in
//! silence. CRI-O has had it on since 1.23.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use memchr::memmem::Finder;

use crate::files;

/// Where containerd's configuration is by default.
const CONTAINERD_CONFIG: &str = "/etc/containerd/config.toml";
/// The first version of containerd's configuration that only containerd 2.0 and newer read.
const CONTAINERD_2_CONFIG_VERSION: u32 = 3;
/// The Go packages that tell containerd's releases apart: its own, those of 2.0, which changed their
/// path (`go.mod`), and that of CDI, which 1.7 was the first to link. A program has the names of its
/// packages' functions for its stack traces, also when it is stripped.
const PACKAGES: [&str; 3] = [
    "github.com/containerd/containerd/",
    "github.com/containerd/containerd/v2/",
    "container-device-interface/",
];
/// Most of a program that is read.
const MOST_BYTES: u64 = 512 << 20;
/// How much of a program is read at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// Where CRI-O's configuration is.
const CRIO_CONFIG: [&str; 2] = ["/etc/crio/crio.conf", "/etc/crio/crio.conf.d"];

/// What is known of a runtime's use of CDI.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Cdi {
    /// No runtime runs here, or none is configured.
    #[default]
    NoRuntime,
    /// containerd reads CDI files, by this configuration.
    On(String),
    /// It does not, by this configuration.
    Off(String),
    /// It cannot: this program of its is older than containerd 1.7.
    Unable(String),
    /// This configuration says nothing: newer versions do, older do not.
    Silent(String),
    /// The configuration of the running containerd cannot be read.
    OutOfSight(String),
    /// CRI-O, whose configuration does not state its version.
    CriO,
}

/// The program of the runtime as it was read last: it has tens of megabytes.
#[derive(Debug, Clone, Default)]
pub struct KnownProgram(Arc<Mutex<Option<KnownRelease>>>);

/// Which file was read, and its release, if it states one.
type KnownRelease = (Identity, Option<Release>);

/// A file's device, inode, size and time of its last change, in seconds and nanoseconds.
type Identity = (u64, u64, u64, i64, i64);

impl KnownProgram {
    /// The release of the program behind `exe`; it is read unless it is the one that is known.
    fn release(&self, exe: &Path) -> Option<Release> {
        let meta = std::fs::metadata(exe).ok()?;
        let changed = (meta.mtime(), meta.mtime_nsec());
        let identity = (meta.dev(), meta.ino(), meta.len(), changed.0, changed.1);
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match *known {
            Some((of, release)) if of == identity => release,
            _ => {
                // One that cannot be read now may be read the next time.
                let packages = contained(exe, PACKAGES)?;
                *known = Some((identity, release(packages)));
                release(packages)
            }
        }
    }
}

/// Of the runtime whose process is seen below `proc`; files are below `root`.
#[must_use]
pub fn of_running_runtime(root: &Path, proc: &Path, known: &KnownProgram) -> Cdi {
    let mut processes = files::processes(proc);
    processes.retain(|process| is_of_host(&proc.join(process.pid.to_string())));
    let containerds = processes
        .iter()
        .filter(|process| process.name == "containerd")
        .map(|process| proc.join(process.pid.to_string()));
    // A process that containerd makes has its name until it runs another program, and may be gone
    // when it is read.
    let mut configs: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
    for process in containerds {
        let command = files::text(&process.join("cmdline"));
        let config = config_argument(&command.unwrap_or_default());
        configs.entry(config).or_default().push(process.join("exe"));
    }
    let configs: Vec<_> = configs.into_iter().collect();
    match configs.as_slice() {
        [] if processes.iter().any(|process| process.name == "crio") => Cdi::CriO,
        [] => Cdi::NoRuntime,
        [(config, programs)] => {
            let configured = of_containerd(root, config);
            let mut known = programs
                .iter()
                .filter_map(|exe| Some((exe, known.release(exe)?)));
            match known.next() {
                Some((exe, release)) => of_program(exe, release, configured),
                None => configured,
            }
        }
        several => {
            let list: Vec<String> = several
                .iter()
                .map(|(config, _)| config.display().to_string())
                .collect();
            Cdi::OutOfSight(format!("(there are several: {})", list.join(", ")))
        }
    }
}

/// Whether a process is in the PID namespace that `/proc` shows. Any pod can have a process with the
/// name of the runtime: it must not decide what the node offers. `NSpid` has a number for each
/// namespace from that one on (proc(5)); it is readable without rights over the process.
fn is_of_host(process: &Path) -> bool {
    let status = files::text(&process.join("status")).unwrap_or_default();
    let mut lines = status.lines();
    let numbers = lines.find_map(|line| line.strip_prefix("NSpid:"));
    numbers.is_none_or(|numbers| numbers.split_whitespace().count() == 1)
}

/// A release of containerd, as far as its use of CDI goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Release {
    /// Older than 1.7.
    WithoutCdi,
    /// 1.7.
    OffByDefault,
    /// 2.0 and newer.
    OnByDefault,
}

/// What the configuration says, completed by what the program behind `exe` can do. A process of
/// another user, or with capabilities that this one has not, does not show its program (proc(5)).
fn of_program(exe: &Path, release: Release, configured: Cdi) -> Cdi {
    let place = std::fs::read_link(exe).map_or_else(
        |_| "containerd".to_owned(),
        |path| path.display().to_string(),
    );
    match (release, configured) {
        (Release::WithoutCdi, _) => Cdi::Unable(place),
        (Release::OffByDefault, Cdi::Silent(config)) => {
            Cdi::Off(format!("{config}, for the containerd 1.7 {place},"))
        }
        (Release::OnByDefault, Cdi::Silent(config)) => {
            Cdi::On(format!("{config}, for the containerd 2 {place},"))
        }
        (Release::OffByDefault | Release::OnByDefault, configured) => configured,
    }
}

/// The release of a program that has these of [`PACKAGES`]; none where it is none of containerd's.
fn release(packages: [bool; 3]) -> Option<Release> {
    match packages {
        [false, ..] => None,
        [_, _, false] => Some(Release::WithoutCdi),
        [_, false, _] => Some(Release::OffByDefault),
        [_, true, _] => Some(Release::OnByDefault),
    }
}

/// Which of these texts a file has; none where it cannot be read to its end.
fn contained<const N: usize>(path: &Path, texts: [&str; N]) -> Option<[bool; N]> {
    // Longer than any release is; a sparse file would keep the daemon reading.
    let mut file = File::open(path).ok()?.take(MOST_BYTES);
    let finders = texts.map(|text| Finder::new(text.as_bytes()));
    let longest = texts
        .iter()
        .map(|text| text.len())
        .max()
        .unwrap_or_default();
    let mut found = [false; N];
    let mut chunk = vec![0; CHUNK_BYTES];
    // What the last chunk ended with, so that a text on the border is seen.
    let mut kept = 0;
    loop {
        let read = file.read(chunk.get_mut(kept..)?).ok()?;
        if read == 0 {
            return Some(found);
        }
        let filled = chunk.get(..kept + read)?;
        for (found, finder) in found.iter_mut().zip(&finders) {
            *found = *found || finder.find(filled).is_some();
        }
        if found.iter().all(|found| *found) {
            return Some(found);
        }
        let end = kept + read;
        kept = longest.min(end);
        chunk.copy_within(end - kept..end, 0);
    }
}

/// Of the runtime that has a configuration in the usual place.
#[must_use]
pub(crate) fn of_configured_runtime(root: &Path) -> Cdi {
    if below(root, Path::new(CONTAINERD_CONFIG)).is_file() {
        of_containerd(root, Path::new(CONTAINERD_CONFIG))
    } else if CRIO_CONFIG
        .iter()
        .any(|path| below(root, Path::new(path)).exists())
    {
        Cdi::CriO
    } else {
        Cdi::NoRuntime
    }
}

/// The configuration that containerd was started with (`-c`, `--config`).
fn config_argument(command: &str) -> PathBuf {
    let mut words = command.split('\0').skip(1);
    while let Some(word) = words.next() {
        let named = match word.split_once('=') {
            Some(("-c" | "--config" | "-config", path)) => Some(path),
            None if matches!(word, "-c" | "--config" | "-config") => words.next(),
            _ => None,
        };
        if let Some(path) = named {
            return path.into();
        }
    }
    CONTAINERD_CONFIG.into()
}

fn of_containerd(root: &Path, config: &Path) -> Cdi {
    let place = config.display().to_string();
    let Some(text) = files::text(&below(root, config)) else {
        return Cdi::OutOfSight(place);
    };
    let imported = imports(&text);
    let texts = imported.iter().flat_map(|path| imported_texts(root, path));
    let words: Vec<bool> = std::iter::once(text.clone())
        .chain(texts)
        .filter_map(|text| enable_cdi(&text))
        .collect();
    // Which of two words counts depends on the order of files and on the version.
    if words.contains(&false) {
        Cdi::Off(place)
    } else if !words.is_empty() {
        Cdi::On(place)
    } else if version(&text).is_some_and(|version| version >= CONTAINERD_2_CONFIG_VERSION) {
        Cdi::On(format!("{place} (of containerd 2.0 or newer)"))
    } else {
        Cdi::Silent(place)
    }
}

/// A path of the host below the host's root.
fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Lines without comments.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
}

/// The value of `enable_cdi`, in whichever table.
fn enable_cdi(text: &str) -> Option<bool> {
    lines(text).find_map(|line| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == "enable_cdi").then(|| value.trim() == "true")
    })
}

/// `version` at the top level.
fn version(text: &str) -> Option<u32> {
    let mut top = lines(text).take_while(|line| !line.starts_with('['));
    top.find_map(|line| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == "version").then(|| value.trim().parse().ok())?
    })
}

/// Paths and patterns in `imports`.
fn imports(text: &str) -> Vec<String> {
    let top: Vec<&str> = lines(text).collect();
    let top = top.join(" ");
    let Some((_, list)) = top.split_once("imports") else {
        return Vec::new();
    };
    let list = list.trim_start().strip_prefix('=').unwrap_or_default();
    let list = list.split(']').next().unwrap_or_default();
    let quoted = list.split(['"', '\'']).skip(1).step_by(2);
    quoted.map(str::to_owned).collect()
}

/// Texts of the files that an import names: one file, or `DIRECTORY/*.toml`.
fn imported_texts(root: &Path, import: &str) -> Vec<String> {
    let path = below(root, Path::new(import));
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Vec::new();
    };
    let name = name.to_string_lossy();
    let names = match name.split_once('*') {
        None => vec![name.to_string()],
        Some((start, end)) => {
            let mut names = files::names(directory);
            names.retain(|name| name.starts_with(start) && name.ends_with(end));
            names
        }
    };
    let texts = names
        .iter()
        .filter_map(|name| files::text(&directory.join(name)));
    texts.collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// What is known where containerd runs with these arguments and files.
    fn of(arguments: &str, paths: &[(&str, &str)]) -> Cdi {
        let root = tempfile::tempdir().unwrap();
        let process = root.path().join("proc/7");
        fs::create_dir_all(&process).unwrap();
        fs::write(process.join("comm"), "containerd\n").unwrap();
        fs::write(process.join("cmdline"), arguments.replace(' ', "\0")).unwrap();
        for (path, text) in paths {
            let path = below(root.path(), Path::new(path));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        of_running_runtime(
            root.path(),
            &root.path().join("proc"),
            &KnownProgram::default(),
        )
    }

    #[test]
    fn containerd_reads_cdi_files_by_its_configurations_version_or_word() {
        let place = || CONTAINERD_CONFIG.to_owned();
        for (text, expected) in [
            (
                "version = 3\n",
                Cdi::On(format!("{} (of containerd 2.0 or newer)", place())),
            ),
            ("version = 2\n", Cdi::Silent(place())),
            ("[x]\nversion = 3\n", Cdi::Silent(place())),
            ("# version = 3\n", Cdi::Silent(place())),
            (
                "version = 2\n[plugins.x]\n  enable_cdi = true # yes\n",
                Cdi::On(place()),
            ),
            (
                "version = 3\n[plugins.x]\n  enable_cdi=false\n",
                Cdi::Off(place()),
            ),
            ("# enable_cdi = true\n", Cdi::Silent(place())),
        ] {
            assert_eq!(
                of("containerd", &[(CONTAINERD_CONFIG, text)]),
                expected,
                "{text}"
            );
        }
    }

    #[test]
    fn a_program_without_cdi_reads_no_cdi_file_whatever_its_configuration_says() {
        let of_packages = |packages: &[&str], config: &str| {
            let root = tempfile::tempdir().unwrap();
            let process = root.path().join("proc/7");
            fs::create_dir_all(&process).unwrap();
            fs::write(process.join("comm"), "containerd\n").unwrap();
            fs::write(process.join("cmdline"), "containerd\0").unwrap();
            // Names on the border of what is read at a time, too.
            let mut program = vec![0_u8; CHUNK_BYTES - 20];
            for package in packages {
                program.extend(package.as_bytes());
                program.resize(program.len() + CHUNK_BYTES - package.len(), 0);
            }
            fs::write(root.path().join("program"), program).unwrap();
            std::os::unix::fs::symlink(root.path().join("program"), process.join("exe")).unwrap();
            fs::create_dir_all(root.path().join("etc/containerd")).unwrap();
            fs::write(root.path().join("etc/containerd/config.toml"), config).unwrap();
            of_running_runtime(
                root.path(),
                &root.path().join("proc"),
                &KnownProgram::default(),
            )
        };
        let (v1, v2, cdi) = (
            "github.com/containerd/containerd/services.Load",
            "github.com/containerd/containerd/v2/core.Load",
            "tags.cncf.io/container-device-interface/pkg/cdi.Refresh",
        );
        let on = "version = 2\nenable_cdi = true\n";
        let silent = "version = 2\n";
        for config in [on, silent] {
            assert!(matches!(of_packages(&[v1], config), Cdi::Unable(_)));
        }
        assert!(matches!(of_packages(&[v1, cdi], silent), Cdi::Off(_)));
        assert!(matches!(of_packages(&[v1, cdi], on), Cdi::On(_)));
        assert!(matches!(of_packages(&[cdi, v2], silent), Cdi::On(_)));
        let off = "version = 3\nenable_cdi = false\n";
        assert!(matches!(of_packages(&[cdi, v2], off), Cdi::Off(_)));
        // A program of something else proves nothing.
        assert!(matches!(of_packages(&[cdi], silent), Cdi::Silent(_)));
        assert!(matches!(of_packages(&[], silent), Cdi::Silent(_)));
    }

    #[test]
    fn imported_files_have_a_say() {
        let main = "version = 3\nimports = [\n  \"/etc/containerd/conf.d/*.toml\",\n  '/opt/more.toml'\n]\n";
        let off = (
            "/etc/containerd/conf.d/9.toml",
            "[plugins.x]\nenable_cdi = false\n",
        );
        let other = ("/etc/containerd/conf.d/9.txt", "enable_cdi = false\n");
        let more = ("/opt/more.toml", "enable_cdi = false\n");
        let main = (CONTAINERD_CONFIG, main);
        assert!(matches!(of("containerd", &[main, off]), Cdi::Off(_)));
        assert!(matches!(of("containerd", &[main, more]), Cdi::Off(_)));
        assert!(matches!(of("containerd", &[main, other]), Cdi::On(_)));
    }

    #[test]
    fn configuration_is_that_of_the_running_process() {
        let files = [
            (CONTAINERD_CONFIG, "version = 3\n"),
            ("/k3s/c.toml", "version = 2\n"),
        ];
        for arguments in [
            "containerd -c /k3s/c.toml -a /run/x",
            "containerd --config=/k3s/c.toml",
        ] {
            assert_eq!(
                of(arguments, &files),
                Cdi::Silent("/k3s/c.toml".into()),
                "{arguments}"
            );
        }
        assert_eq!(
            of("containerd -c /else.toml", &files),
            Cdi::OutOfSight("/else.toml".into())
        );
        assert!(matches!(
            of("containerd --log-level warn", &files),
            Cdi::On(_)
        ));
    }

    #[test]
    fn a_file_without_a_process_is_of_no_running_runtime() {
        let root = tempfile::tempdir().unwrap();
        let file = below(root.path(), Path::new(CONTAINERD_CONFIG));
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "version = 3\n").unwrap();
        let proc = root.path().join("proc");
        assert_eq!(
            of_running_runtime(root.path(), &proc, &KnownProgram::default()),
            Cdi::NoRuntime
        );
        assert!(matches!(of_configured_runtime(root.path()), Cdi::On(_)));
        fs::create_dir_all(proc.join("9")).unwrap();
        fs::write(proc.join("9/comm"), "crio\n").unwrap();
        assert_eq!(
            of_running_runtime(root.path(), &proc, &KnownProgram::default()),
            Cdi::CriO
        );
    }

    #[test]
    fn a_process_of_a_pod_with_the_runtimes_name_is_not_the_runtime() {
        let root = tempfile::tempdir().unwrap();
        let process = root.path().join("proc/77");
        fs::create_dir_all(&process).unwrap();
        fs::write(process.join("comm"), "crio\n").unwrap();
        let proc = root.path().join("proc");
        let seen = || of_running_runtime(root.path(), &proc, &KnownProgram::default());
        fs::write(process.join("status"), "Name:\tcrio\nNSpid:\t77\t1\n").unwrap();
        assert_eq!(seen(), Cdi::NoRuntime);
        fs::write(process.join("status"), "Name:\tcrio\nNSpid:\t77\n").unwrap();
        assert_eq!(seen(), Cdi::CriO);
    }
}
