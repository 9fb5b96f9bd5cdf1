# Installs the library so that find_package(flashoverlap) works (tests/package tries it).
include(CMakePackageConfigHelpers)

set(flashoverlap_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flashoverlap)
get_target_property(library_type flashoverlap TYPE)
if(library_type STREQUAL "STATIC_LIBRARY")
  set(FLASHOVERLAP_IS_STATIC ON)
else()
  set(FLASHOVERLAP_IS_STATIC OFF)
endif()

if(TARGET MPI::MPI_CXX)
  set(FLASHOVERLAP_HAS_MPI ON)
else()
  set(FLASHOVERLAP_HAS_MPI OFF)
endif()
set(FLASHOVERLAP_USES_MPI OFF)
if(TARGET MPI::MPI_CXX)
  set(FLASHOVERLAP_USES_MPI ON)
endif()

install(TARGETS flashoverlap EXPORT flashoverlapTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/flashoverlap DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT flashoverlapTargets NAMESPACE flashoverlap:: DESTINATION ${flashoverlap_package_dir})

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/flashoverlapConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/flashoverlapConfig.cmake
                              INSTALL_DESTINATION ${flashoverlap_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flashoverlapConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flashoverlapConfig.cmake ${PROJECT_BINARY_DIR}/flashoverlapConfigVersion.cmake
              ${CMAKE_CURRENT_LIST_DIR}/FindOpenBLAS.cmake DESTINATION ${flashoverlap_package_dir})
