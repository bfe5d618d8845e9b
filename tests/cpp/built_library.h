// Shared libraries built by a test, to stand in for ones that a machine has or lacks.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

namespace kvpush {

// A folder that goes with the test, and a compiler for it (the environment's CXX, or c++).
class LibraryBuilder {
 public:
  LibraryBuilder() {
    std::string name = (std::filesystem::temp_directory_path() / "kvpush-test-XXXXXX").string();
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  ~LibraryBuilder() { std::filesystem::remove_all(folder_); }
  LibraryBuilder(const LibraryBuilder&) = delete;
  LibraryBuilder& operator=(const LibraryBuilder&) = delete;

  std::string path(const std::string& file) const { return (folder_ / file).string(); }

  // The built library's path.
  std::string build(const std::string& name, const std::string& source) const {
    std::ofstream(path(name + ".cpp")) << source;
    const char* const compiler = std::getenv("CXX");
    const std::string command = std::string(compiler == nullptr ? "c++" : compiler) +
                                " -shared -fPIC -o " + path(name + ".so") + " " +
                                path(name + ".cpp");
    EXPECT_EQ(std::system(command.c_str()), 0) << "cannot build with: " << command;
    return path(name + ".so");
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace kvpush
