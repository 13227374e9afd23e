// The declarations of Apple's framework Metal that exported Swift uses, spelled as its documentation spells them, with the little
// behaviour that tests look at: types are checked, and launches are recorded, where the framework is absent. Nothing runs on a GPU.

public struct MTLSize: Sendable {
    public var width: Int
    public var height: Int
    public var depth: Int

    public init(width: Int, height: Int, depth: Int) {
        self.width = width
        self.height = height
        self.depth = depth
    }
}

public enum MTLDataType: UInt, Sendable {
    case none = 0
    case float = 3
    case half = 16
    case int = 29
    case uint = 33
    case short = 37
    case ushort = 41
    case char = 45
    case uchar = 49
    case bool = 53
    case long = 81
    case ulong = 85
    case bfloat = 121
}

public enum MTLLanguageVersion: UInt, Sendable {
    case version2_4 = 0x20004
    case version3_0 = 0x30000
    case version3_1 = 0x30001
}

public enum MTLMathMode: Int, Sendable {
    case safe, relaxed, fast
}

open class MTLCompileOptions {
    open var languageVersion = MTLLanguageVersion.version2_4
    open var mathMode = MTLMathMode.fast
    open var fastMathEnabled = true

    public init() {}
}

open class MTLFunctionConstantValues {
    /// The values of the constants of 4 bytes or fewer that were set, by index.
    public private(set) var values: [Int: (type: MTLDataType, bytes: [UInt8])] = [:]

    public init() {}

    open func setConstantValue(_ value: UnsafeRawPointer, type: MTLDataType, index: Int) {
        let count = type == .bool ? 1 : 4
        values[index] = (type, Array(UnsafeRawBufferPointer(start: value, count: count)))
    }
}

public protocol MTLBuffer: AnyObject {
    var length: Int { get }
    func contents() -> UnsafeMutableRawPointer
}

public protocol MTLFunction: AnyObject {
    var name: String { get }
}

public protocol MTLLibrary: AnyObject {
    func makeFunction(name: String, constantValues: MTLFunctionConstantValues) throws -> any MTLFunction
}

public protocol MTLComputePipelineState: AnyObject {
    var maxTotalThreadsPerThreadgroup: Int { get }
    var threadExecutionWidth: Int { get }
}

public struct MTLResourceOptions: OptionSet, Sendable {
    public let rawValue: UInt
    public static let storageModeShared = MTLResourceOptions([])

    public init(rawValue: UInt) {
        self.rawValue = rawValue
    }
}

public protocol MTLDevice: AnyObject {
    var maxThreadgroupMemoryLength: Int { get }
    func makeLibrary(source: String, options: MTLCompileOptions?) throws -> any MTLLibrary
    func makeComputePipelineState(function: any MTLFunction) throws -> any MTLComputePipelineState
    func makeCommandQueue() -> (any MTLCommandQueue)?
    func makeBuffer(length: Int, options: MTLResourceOptions) -> (any MTLBuffer)?
}

public protocol MTLCommandQueue: AnyObject {
    func makeCommandBuffer() -> (any MTLCommandBuffer)?
}

public protocol MTLCommandBuffer: AnyObject {
    var error: (any Error)? { get }
    func makeComputeCommandEncoder() -> (any MTLComputeCommandEncoder)?
    func commit()
    func waitUntilCompleted()
}

public protocol MTLComputeCommandEncoder: AnyObject {
    func setComputePipelineState(_ state: any MTLComputePipelineState)
    func setBuffer(_ buffer: (any MTLBuffer)?, offset: Int, index: Int)
    func setBytes(_ bytes: UnsafeRawPointer, length: Int, index: Int)
    func dispatchThreadgroups(_ threadgroupsPerGrid: MTLSize, threadsPerThreadgroup: MTLSize)
    func endEncoding()
}

public func MTLCreateSystemDefaultDevice() -> (any MTLDevice)? { nil }
