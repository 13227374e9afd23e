//! `flashtile.h` is what cbindgen writes of the sources.

use std::path::Path;

#[test]
fn the_header_is_that_of_the_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    config.after_includes = Some(format!(
        "\n// The version of this header.\n#define FLASHTILE_VERSION \"{}\"",
        env!("CARGO_PKG_VERSION")
    ));
    let sources = ["status", "tensors", "attention", "cache"];
    let builder = sources.iter().fold(cbindgen::Builder::new().with_config(config), |builder, source| {
        builder.with_src(folder.join("src").join(source).with_extension("rs"))
    });
    let mut made = Vec::new();
    builder.generate().unwrap().write(&mut made);
    let (header, made) = (folder.join("flashtile.h"), String::from_utf8(made).unwrap());
    if std::env::var_os("FLASHTILE_BLESS").is_some() {
        std::fs::write(&header, &made).unwrap();
    }
    let kept = std::fs::read_to_string(&header).unwrap().replace("\r\n", "\n");
    let differs = kept.lines().zip(made.lines()).find(|(kept, made)| kept != made);
    assert!(
        kept == made,
        "flashtile.h is not what cbindgen writes of the sources ({differs:?}): FLASHTILE_BLESS=1 writes it anew"
    );
}
