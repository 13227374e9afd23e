// The declarations of Foundation that exported Swift uses, as its documentation spells them: for checking types where the headers of
// the C library, which Foundation imports, are absent. Nothing here runs.

public struct URL: Sendable {
    public init(fileURLWithPath path: String) { fatalError() }
    public func appendingPathComponent(_ pathComponent: String) -> URL { fatalError() }
}

extension String {
    public struct Encoding: Sendable {
        public static var utf8: Encoding { fatalError() }
    }

    public init(contentsOf url: URL, encoding enc: Encoding) throws { fatalError() }
}
